"""Horovod's exceptions, under Horovod's names."""

from hora.errors import CollectiveError


class HorovodInternalError(CollectiveError, RuntimeError):
    """An operation could not be done: ranks asked for things that do not fit together, or one is gone. A `RuntimeError`, as in Horovod."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts came or went; scripts name it in `except` clauses. Nothing raises it as long as `hvd.elastic` is not there."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync
