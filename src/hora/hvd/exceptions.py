"""Horovod's exceptions, under Horovod's names."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from hora.errors import CollectiveError

P = ParamSpec("P")
T = TypeVar("T")


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


def brief(function: Callable[P, T]) -> Callable[P, T]:
    """Has a HorovodInternalError of `function` show the line of the script that called it, and of Hora's frames this one only.

    Such an error says itself what went wrong, on which ranks; it was made in another thread, or on another rank.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except HorovodInternalError as error:
            raise error.with_traceback(None) from None

    return call
