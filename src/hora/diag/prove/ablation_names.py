"""Names of what can be taken out of a script, as `HORA_PROVE_WITHOUT` holds them. Loads no torch."""

from typing import Final

FLOAT64: Final = "float64"
"""Everything is computed in float64, so that rounding is a billion times smaller."""

DROPOUT: Final = "dropout"
"""Nothing is dropped."""

BATCH_NORM: Final = "batch_norm"
"""BatchNorm uses its running statistics while it trains."""
