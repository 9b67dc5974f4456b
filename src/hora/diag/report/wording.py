"""Figures and names as a report says them."""

from collections.abc import Sequence
from typing import Final

_FEW_NAMES: Final = 2


def percent(share: float) -> str:
    """`41 %`."""
    return f"{100 * share:.0f} %"


def ms(seconds: float) -> str:
    """`3.20 ms`, `32.0 ms`, `320 ms`."""
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def say_bytes(size_bytes: int) -> str:
    """`39 MB`, `1.2 MB`, `3.4 KB`, `48 bytes`."""
    if size_bytes >= 10e6:
        return f"{size_bytes / 1e6:,.0f} MB"
    if size_bytes >= 1e6:
        return f"{size_bytes / 1e6:.1f} MB"
    return f"{size_bytes / 1e3:.1f} KB" if size_bytes >= 1e3 else f"{size_bytes} bytes"


def say_names(names: Sequence[str]) -> str:
    """The first names of parameters, and how many more there are."""
    return ", ".join(names[:_FEW_NAMES]) + (f" and {len(names) - _FEW_NAMES} more" if len(names) > _FEW_NAMES else "")
