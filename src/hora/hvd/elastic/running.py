"""Runs a function again and again until it has come to its end: from what was committed, when something goes wrong."""

import functools
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from hora import env, log
from hora.errors import HoraError
from hora.hvd.basics import init, shutdown
from hora.hvd.elastic.commits import find_commits
from hora.hvd.elastic.state import EndAsked, NoNotice, NoShelf, Notice, State
from hora.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt, shortened
from hora.hvd.process_sets import register_one
from hora.hvd.state import current as state_in_force
from hora.train.preemption import EXIT_CODE, SIGNALS, Preemption

_FRUITLESS = 3
"""So many resets in a row without a commit: the error would come again for ever."""

_calls = itertools.count()
"""Numbers of the elastic calls of this process, the same on all ranks."""


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Makes of `func(state, ...)` a function that begins with the same state on all ranks, and goes on from the last commit after an error.

    Where the processes have taken the place of others (`hora run --max-restarts`), it begins with what those had committed. After an error that
    all ranks have lived through (HorovodInternalError) the ranks meet anew and go on from the last commit, in the same processes. When the
    launcher or a scheduler asks for the end (SIGTERM, SIGUSR1), all ranks commit together in their next commit, and end with exit code 75; the job
    does so too if HORA_HVD_COMMIT_DIR names where the commit outlives it, else with 143.

    Collective: all ranks call the function, with states of the same names, and no operation of `hvd` before it that ranks started anew skip.

    Args:
        func: takes a `State`, and whatever else it is called with.
    """
    return run_fn(func, _reset)


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """As `run`, with `reset` in place of `hvd.shutdown` and `hvd.init`."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        try:
            return _run_kept(lambda: func(state, *args, **kwargs), state, reset)
        except Exception as error:
            raise shortened(error, __file__)  # noqa: B904 (the same error, with what it came from)

    return wrapper


def _run_kept(act: Callable[[], Any], state: State, reset: Callable[[], None]) -> Any:
    with _keeping(state):
        try:
            return _run(act, state, reset)
        except EndAsked:
            state.save()  # what was not committed is not lost
            state._shelf.keep(state._to_tree)
            state._shelf.end()
            log.get_logger().info("the ranks have committed, and end, as they were asked to; %s", state._shelf.prospect)
    return _end()


def _reset() -> None:
    """Has the ranks meet anew, with the process sets that there were."""
    before = state_in_force()
    shutdown()
    init(process_sets="dynamic" if before.dynamic else None)
    for process_set in list(before.sets.values())[1:]:
        register_one(process_set)


def _run(act: Callable[[], Any], state: State, reset: Callable[[], None]) -> Any:
    skip_sync, fruitless, commits = False, 0, state._commits
    while True:
        try:
            if not skip_sync:
                state.sync()
            return act()
        except HorovodInternalError as error:
            fruitless = fruitless + 1 if state._commits == commits else 0
            if fruitless > _FRUITLESS:
                error.add_note(f"elastic.run gives up: nothing was committed since the error before, {_FRUITLESS} times in a row")
                raise
            # Before the wait, which a rank that does not come any more makes as long as can be.
            log.get_logger().warning(
                "all ranks are to meet anew, by the deadline of %s, and to go on from the last commit, after: %s", env.TIMEOUT_S, error
            )
            state.restore()
            try:
                reset()
            except HoraError as failed:
                error.add_note(f"elastic.run gives up, for the ranks cannot meet anew: {failed}")
                raise error from None
            skip_sync = False
        except EndAsked:
            raise
        except HostsUpdatedInterrupt as interrupt:
            state.save()  # nothing went wrong: what was not committed is not lost
            reset()
            skip_sync = interrupt.skip_sync
        commits = state._commits
        state.on_reset()


def _end() -> NoReturn:
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:  # whoever asks twice must not end by a signal what has saved
            signal.signal(number, signal.SIG_IGN)
    raise SystemExit(EXIT_CODE)


@contextmanager
def _keeping(state: State) -> Iterator[None]:
    """Inside the `with` block commits are kept where processes that come after these find them, if there is such a place."""
    shelf, found = find_commits(next(_calls))
    if shelf is not None and not state._is_kept():
        log.get_logger().warning(
            "commits of a %s are in memory only, and lost when its processes are: derive it from ObjectState, and handlers from StateDictHandler",
            type(state).__name__,
        )
        shelf = None
    if shelf is None:
        _warn_of_nothing_kept()
        yield
        return
    if found is not None:
        state._from_tree(found)
        state.on_reset()
        log.get_logger().info("going on from the last commit")
    with _noticing() as notice:
        state._shelf, state._notice = shelf, notice
        try:
            yield
        finally:
            state._shelf, state._notice = NoShelf(), NoNotice()


def _warn_of_nothing_kept() -> None:
    here = state_in_force().session
    if here.generation and here.rank == 0:
        log.get_logger().warning(
            "this job was started anew, but begins anew too: its launcher could keep no commits for it, since it runs no rank beside itself, or is "
            "none of Hora's; name a directory that all hosts see with %s",
            env.HVD_COMMIT_DIR,
        )


@contextmanager
def _noticing() -> Iterator[Notice]:
    """Notices that the end is asked for, where Python tells: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield NoNotice()
        return
    with Preemption() as preemption:
        yield preemption
