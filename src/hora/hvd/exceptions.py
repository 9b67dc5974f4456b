"""Horovod's exceptions, under Horovod's names."""

from hora.errors import CollectiveError


class HorovodInternalError(CollectiveError, RuntimeError):
    """An operation could not be done: ranks asked for things that do not fit together, or one is gone. A `RuntimeError`, as in Horovod."""


class HostsUpdatedInterrupt(RuntimeError):
    """Ranks are to come or go: `hvd.elastic.run` has the ranks meet anew, or end when all have committed.

    Args:
        skip_sync: whether the state need not be synchronised after that, since nobody is new.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync
