"""Starts a job anew when it fails, and when hosts come or go: all ranks, on the hosts that there are (`scout`).

A generation is a whole job, with processes, rendezvous, key and logs of its own, so that nothing of the one before can reach into it. The ranks know
its number (HORA_GENERATION), and checkpoints carry it: what a process of an earlier generation might still write is older by its name.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

from hora import env
from hora.errors import LaunchError
from hora.exits import WRONG
from hora.launch.inbox import Interrupted
from hora.launch.job_directory import base_directory, job_directory
from hora.launch.job_events import SAVED_EXIT_CODE, FailureSeen, Finish, NodeLost, SaveSeen, StopAsked
from hora.launch.meeting import new_job_id
from hora.launch.options import LaunchOptions
from hora.launch.part import say
from hora.launch.scout import Scout
from hora.launch.unusable import HostsRefused, HostsUnusable


def run_with_restarts(options: LaunchOptions, run: Callable[[LaunchOptions], Finish], scout: Scout) -> int:
    """Has `run` run the job, again after a failure, up to `options.max_restarts` times, and as often as hosts come and go where they may.

    Returns the exit code of the last one.
    """
    if not options.max_restarts and not options.elastic:
        return run(options).exit_code
    # What ranks leave there for those that come after them is gone when the job is.
    try:
        with _signals_between_starts(), job_directory(base_directory()) as kept_dir:
            return _run(replace(options, job_id=options.job_id or new_job_id(), kept_dir=kept_dir), run, scout)
    except Interrupted as interrupted:
        return interrupted.exit_code


def _run(first: LaunchOptions, run: Callable[[LaunchOptions], Finish], scout: Scout) -> int:
    options, restarts = _enough(scout.muster(first), first), 0
    while True:
        try:
            finish = run(options)
        except (HostsUnusable, HostsRefused) as error:
            options = _without_unusable_hosts(options, error, scout)
            continue
        saved = _has_saved_to_go_on(options, finish)
        if not saved and (not _is_failure(options, finish) or restarts >= options.max_restarts):
            return _end(finish)
        if _would_come_again(finish):
            say(f"not started anew: exit code {WRONG} says that it would end in the same way")
            return _end(finish)
        left = scout.muster(options, _lost_hosts(options, finish))
        if left is None:
            _say_too_few(options, "not started anew")
            return _end(finish)
        restarts += not saved
        options = _next_generation(left, first)
        ranks = f" with {_ranks(options)}" if scout.may_miss(options.generation) else ""
        budget = "after a save, which uses up no restart" if saved else f"restart {restarts} of at most {options.max_restarts}"
        say(f"all ranks are started anew{ranks}: {budget}; the logs so far are in {finish.logs}")


def _end(finish: Finish) -> int:
    """The exit code of the job: 75 only if the next one can go on from what was saved."""
    if not finish.fleeting or finish.exit_code != SAVED_EXIT_CODE:
        return finish.exit_code
    say(
        f"ended as it was asked to, and what the ranks had committed is gone with the job: the exit code is {128 + signal.SIGTERM}, and not "
        f"{SAVED_EXIT_CODE}. Let {env.HVD_COMMIT_DIR} name a directory, and the next start goes on from the commit there"
    )
    return 128 + signal.SIGTERM


@contextmanager
def _signals_between_starts() -> Iterator[None]:
    """Between two generations there is nobody to tell of SIGUSR1 and SIGUSR2, which must not end the launcher then.

    What asks for the end does, but not before this launcher has cleared away what is its own.
    """

    def leave(_signum: int, _frame: FrameType | None) -> None:
        raise Interrupted(signal.SIGTERM)

    before: dict[str, Any] = {}
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is signal.SIG_DFL:
            before[name] = signal.signal(getattr(signal, name), leave)
    for name in ("SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
            # Not ignored: processes that are started would ignore it, too.
            before[name] = signal.signal(getattr(signal, name), lambda *_: None)
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def _has_saved_to_go_on(options: LaunchOptions, finish: Finish) -> bool:
    """Whether the ranks have ended, by exit code 75, because the launcher asked them to, or because one of the hosts is to go."""
    if finish.unkillable or finish.asked or finish.exit_code != SAVED_EXIT_CODE:
        return False
    return (finish.regroup and isinstance(finish.cause, SaveSeen)) or bool(_lost_hosts(options, finish))


def _is_failure(options: LaunchOptions, finish: Finish) -> bool:
    """Whether it ended because something went wrong, and not because somebody asked for the end."""
    if finish.unkillable or finish.asked:
        return False  # what is left of it would be in the way; or somebody wants the end, who was late
    return isinstance(finish.cause, NodeLost | FailureSeen) or bool(_lost_hosts(options, finish))


def _would_come_again(finish: Finish) -> bool:
    """Whether the rank that failed has said so."""
    return isinstance(finish.cause, FailureSeen) and finish.exit_code == WRONG


def _lost_hosts(options: LaunchOptions, finish: Finish) -> list[int]:
    """The hosts, by index, with which the job does not go on: one that was lost; and where others may come, one whose agent was told to end."""
    match finish.cause:
        case NodeLost(node=node):
            return [node]
        case StopAsked(node=node, signum=signal.SIGTERM) if options.elastic and not finish.asked and node < len(options.hosts):
            return [node]
        case _:
            return []


def _without_unusable_hosts(options: LaunchOptions, error: HostsUnusable | HostsRefused, scout: Scout) -> LaunchOptions:
    """The job on the hosts that could be used when it was to be started.

    Raises:
        HostsUnusable, HostsRefused: `error`, if all hosts are needed, too few are left, or it is the first start and what the user gave is wrong.
    """
    if not scout.may_miss(options.generation) or (options.generation == 0 and isinstance(error, HostsRefused)):
        raise error
    if options.elastic:
        say(str(error))  # now, since others may be waited for
    left = scout.muster(options, error.nodes)
    if left is None:
        _say_too_few(options, "not started anew" if options.generation else "not started")
        raise error
    say(("" if options.elastic else f"{error}\n      ") + f"left out: the job goes on with {_ranks(left)}")
    return left


def _enough(mustered: LaunchOptions | None, options: LaunchOptions) -> LaunchOptions:
    if mustered is None:
        raise LaunchError(
            f"there must be slots for --min-ranks {options.fewest_ranks} on hosts that can be used, but there were fewer for "
            f"{options.join_timeout_s:g} s; give more hosts, or wait longer with --join-timeout"
        )
    return mustered


def _next_generation(options: LaunchOptions, first: LaunchOptions) -> LaunchOptions:
    generation = options.generation + 1
    log_dir = None if first.log_dir is None else first.log_dir / f"restart-{generation}"
    return replace(options, generation=generation, log_dir=log_dir)


def _ranks(options: LaunchOptions) -> str:
    ranks, hosts = options.nproc or 0, len(options.hosts)
    return f"{ranks} rank{'s' * (ranks != 1)} on {hosts} host{'s' * (hosts != 1)}"


def _say_too_few(options: LaunchOptions, what: str) -> None:
    say(f"{what}: fewer than --min-ranks {options.fewest_ranks} are left without the hosts that cannot be used")
