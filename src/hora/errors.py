"""The exceptions that Hora raises, as one tree.

Each message says what must hold, what was found, where, and what to do. A user's mistake is a `ConfigError`, raised where it enters.
"""


class HoraError(Exception):
    """Base of every error that Hora raises on purpose."""


class ConfigError(HoraError, ValueError):
    """A value that the user gave is wrong; nothing has been started or written."""


class LaunchError(HoraError):
    """The processes of a job could not be started or kept running."""


class RendezvousTimeout(LaunchError):
    """Not every rank arrived before the deadline; the message names the missing ones."""


class RankFailed(LaunchError):
    """A rank that `hora.run` started failed: `rank` is which, `trace` its traceback, empty if it died without one."""

    def __init__(self, message: str, rank: int, trace: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.trace = trace


class CollectiveError(HoraError):
    """A collective could not be completed."""


class CollectiveTimeout(CollectiveError):
    """A rank did not take part in a collective before its deadline."""


class PeerLost(CollectiveError):
    """A rank that takes part in a collective is gone."""


class CollectiveMismatch(CollectiveError):
    """Ranks called different collectives, or the same one with different shapes, types or models."""


class ReplicaMismatch(HoraError):
    """Parameters that must be the same on all ranks are not."""


class NonFiniteGradient(HoraError, ArithmeticError):
    """The gradient of the global batch has a NaN or an infinity; no rank has applied it."""


class DataError(HoraError):
    """The next samples could not be had."""


class CheckpointError(HoraError):
    """A checkpoint could not be written or read."""


class CheckpointUnwritten(CheckpointError):
    """The disk refused a checkpoint: it is full, fails, is read-only or out of reach. Those before it are untouched; a later one may be written."""


class CheckpointIncomplete(CheckpointError):
    """A checkpoint lacks files, or a file differs from the digest in its manifest."""


class CheckpointMismatch(CheckpointError):
    """A whole checkpoint that does not fit the model or the configuration it is loaded into."""
