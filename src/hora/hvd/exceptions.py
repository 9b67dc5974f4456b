"""Horovod's exceptions, under Horovod's names."""

import functools
import os
from collections.abc import Callable, Iterator
from types import ModuleType, TracebackType
from typing import ParamSpec, TypeVar

import torch

import hora
from hora.errors import CollectiveError, ConfigError, HoraError, LaunchError

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


class HorovodVersionMismatchError(ImportError):
    """For `except` clauses of scripts; nothing raises it, for there is no compiled part that could be of another version."""


class InitializationFailed(LaunchError, ValueError):
    """The ranks could not meet; a `ValueError`, as in Horovod."""


class WrongType(ConfigError, TypeError):
    """Something else was given than what the call takes."""


class WrongNumberOfRanks(ConfigError, NotImplementedError):
    """So many ranks are not served; a `NotImplementedError`, as in Horovod."""


class NoRows(ConfigError, IndexError):
    """A tensor has no dimension in which it could be put behind others; an `IndexError`, as in Horovod."""


def brief(function: Callable[P, T]) -> Callable[P, T]:
    """Has an error that Hora raises on purpose show the lines of the script, and of Hora's frames this one only.

    Such an error says itself what went wrong, on which ranks; it may have been made in another thread, or on another rank. Of any other, which may be
    a mistake of Hora's, nothing is left out.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except HoraError as error:
            raise error.with_traceback(lines_of_script(error.__traceback__)) from None

    return call


def shortened(error: Exception, caller: str) -> Exception:
    """`error` with the lines of the script, as `brief` shows it; of any other error the first frames are left out, which are those of `caller`."""
    trace = error.__traceback__
    if isinstance(error, HoraError):
        return error.with_traceback(lines_of_script(trace))
    while trace is not None and trace.tb_frame.f_code.co_filename == caller:
        trace = trace.tb_next
    return error if trace is None else error.with_traceback(trace)


def lines_of_script(trace: TracebackType | None) -> TracebackType | None:
    """What of `trace` is the script's: without Hora's frames, and without torch's at its end."""
    found = [each for each in _walk(trace) if not _is_of(hora, each)]
    while found and _is_of(torch, found[-1]):
        found.pop()
    rebuilt = None
    for each in reversed(found):
        rebuilt = TracebackType(rebuilt, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return rebuilt


def _walk(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_of(package: ModuleType, trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(tuple(f"{path}{os.sep}" for path in package.__path__))
