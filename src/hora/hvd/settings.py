"""What Horovod's variables ask for."""

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path

from hora.errors import ConfigError
from hora.hvd.negotiation.coordinator import Tuning

_MB = 2**20
_STALL_END_S = 1800.0
"""Horovod waits for ever unless it is told otherwise. Long enough for rank 0 to evaluate alone; 0 asks for what Horovod does."""


def tuning_from(environ: Mapping[str, str] = os.environ) -> Tuning:
    """The tuning that the variables `HOROVOD_*` ask for.

    Raises:
        ConfigError: one is not a number from 0.
    """
    warn_s = _number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0)
    end_s = _number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", _STALL_END_S)
    watched = not is_on("HOROVOD_STALL_CHECK_DISABLE", environ)
    return Tuning(
        fusion_bytes=int(_number(environ, "HOROVOD_FUSION_THRESHOLD", 128.0 * _MB)),
        cycle_s=_number(environ, "HOROVOD_CYCLE_TIME", 1.0) / 1000,
        cache_capacity=int(_number(environ, "HOROVOD_CACHE_CAPACITY", 1024.0)),
        stall_warn_s=warn_s if watched and warn_s > 0 else None,
        stall_end_s=end_s if watched and end_s > 0 else None,
    )


def timeline_from(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file that HOROVOD_TIMELINE names; None: none."""
    named = environ.get("HOROVOD_TIMELINE", "")
    return None if named in ("", "DYNAMIC") else Path(named)


def log_level_from(environ: Mapping[str, str] = os.environ) -> int | None:
    """The least level of what is said that HOROVOD_LOG_LEVEL asks for; None: it does not.

    Raises:
        ConfigError: there is no such level.
    """
    levels = {"TRACE": 1, "DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR}
    levels["FATAL"] = logging.CRITICAL
    named = environ.get("HOROVOD_LOG_LEVEL", "")
    if named and named.upper() not in levels:
        raise ConfigError(f"HOROVOD_LOG_LEVEL must be one of {', '.join(levels)}, but is {named!r} instead")
    return levels[named.upper()] if named else None


def is_on(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a variable is set to something else than 0, as Horovod reads its own."""
    return environ.get(name, "0") not in ("", "0")


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be a number from 0, but is {text!r} instead")
    return value
