"""What must be the same: between a run and its checkpoint, and between `hora.init` and the configuration."""

from collections.abc import Mapping
from typing import Any

from hora.comm.session import session
from hora.errors import CheckpointMismatch, ConfigError


def require_mode(logical_ranks: int | None) -> None:
    """Compares exact mode of the session with that of the configuration: its logical ranks, or None.

    Raises:
        ConfigError: they differ.
    """
    exact = session().exact
    here = exact and exact.logical_ranks
    if here != logical_ranks:
        raise ConfigError(
            f"hora.init and the configuration must agree on exact mode, but hora.init has {here or 'no'} logical ranks and the configuration "
            f"{logical_ranks or 'none'}"
        )


def require_same(what: str, give: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Compares what a run has with what its checkpoint has.

    Args:
        what: they are, for the message.
        give: what to give so that they are the same.
        here: of this start of the run.
        there: of the checkpoint.

    Raises:
        CheckpointMismatch: they differ; names which.
    """
    differing = [name for name in here if here[name] != there.get(name)]
    if differing:
        raise CheckpointMismatch(
            f"a run must go on with the {what} it began with, but these are others now: {', '.join(differing)}; give {give}, or begin anew in "
            "another run directory"
        )
