"""Log lines with the rank in front of them: `[rank 3/8] message`.

One logger, `hora`. Ranks other than 0 print warnings and errors only. Relies on the standard library alone.
"""

import logging
import sys
from typing import TextIO

_logger = logging.getLogger("hora")


def get_logger() -> logging.Logger:
    """The logger that all of Hora writes to."""
    return _logger


def configure(rank: int, world_size: int, level: int = logging.INFO) -> None:
    """Prints the logger's lines on standard error with this rank's prefix; below a warning only rank 0 speaks."""
    handler = _OnStandardError()
    prefix = f"[rank {rank}/{world_size}] " if world_size > 1 else ""
    handler.setFormatter(logging.Formatter(prefix + "%(message)s"))
    _logger.handlers[:] = [handler]
    _logger.propagate = False
    _logger.setLevel(level if rank == 0 else max(level, logging.WARNING))


class _OnStandardError(logging.StreamHandler[TextIO]):
    """Writes to what standard error is now: what it was when the logger was prepared may have been closed since."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr
