"""Starts a job anew when it fails: all ranks, on what is left.

A generation is a whole job, with processes, rendezvous, key and logs of its own, so that nothing of the one before can reach into it. The ranks know
its number (HORA_GENERATION), and checkpoints carry it: what a process of an earlier generation might still write is older by its name.
"""

import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from hora.exits import WRONG
from hora.launch.dealing import count_slots
from hora.launch.hosts import Host
from hora.launch.job_directory import base_directory, job_directory
from hora.launch.meeting import new_job_id
from hora.launch.options import LaunchOptions
from hora.launch.part import say
from hora.launch.supervisor import FailureSeen, Finish, NodeLost
from hora.launch.unusable import HostsRefused, HostsUnusable


def run_with_restarts(options: LaunchOptions, run: Callable[[LaunchOptions], Finish]) -> int:
    """Has `run` run the job, again after a failure, up to `options.max_restarts` times; returns the exit code of the last one."""
    if not options.max_restarts:
        return run(options).exit_code
    # What ranks leave there for those that come after them is gone when the job is.
    with _notices_passed_over(), job_directory(base_directory()) as kept_dir:
        return _run(replace(options, job_id=options.job_id or new_job_id(), kept_dir=kept_dir), run)


def _run(first: LaunchOptions, run: Callable[[LaunchOptions], Finish]) -> int:
    options = first
    while True:
        try:
            finish = run(options)
        except (HostsUnusable, HostsRefused) as error:
            options = _without_unusable_hosts(options, error)
            say(f"{error}\n      left out: the job goes on with {options.nproc} ranks on {len(options.hosts)} hosts")
            continue
        if not _is_failure(finish) or options.generation >= options.max_restarts:
            return finish.exit_code
        if _would_come_again(finish):
            say(f"not started anew: exit code {WRONG} says that it would end in the same way")
            return finish.exit_code
        left = _without_lost_host(options, finish)
        if left is None:
            _say_too_few(options)
            return finish.exit_code
        options = replace(left, generation=options.generation + 1)
        if first.log_dir is not None:
            options = replace(options, log_dir=first.log_dir / f"restart-{options.generation}")
        ranks = f" with {options.nproc} ranks on {len(options.hosts)} hosts" if left.hosts != first.hosts else ""
        say(f"all ranks are started anew{ranks}: restart {options.generation} of at most {options.max_restarts}")


@contextmanager
def _notices_passed_over() -> Iterator[None]:
    """Between two generations there is nobody to tell of SIGUSR1 and SIGUSR2, which must not end the launcher then."""
    before = {}
    for name in ("SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
            # Not ignored: processes that are started would ignore it, too.
            before[name] = signal.signal(getattr(signal, name), lambda *_: None)
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def _is_failure(finish: Finish) -> bool:
    """Whether it ended because something went wrong, and not because somebody asked for the end."""
    if finish.unkillable or finish.asked:
        return False  # what is left of it would be in the way; or somebody wants the end, who was late
    return isinstance(finish.cause, NodeLost | FailureSeen)


def _would_come_again(finish: Finish) -> bool:
    """Whether the rank that failed has said so."""
    return isinstance(finish.cause, FailureSeen) and finish.exit_code == WRONG


def _without_lost_host(options: LaunchOptions, finish: Finish) -> LaunchOptions | None:
    """The job on the hosts that are left, if one was lost and may be missed; None if too few ranks would be."""
    if options.min_ranks is None or not isinstance(finish.cause, NodeLost):
        return options
    return _without(options, [finish.cause.node])


def _without_unusable_hosts(options: LaunchOptions, error: HostsUnusable | HostsRefused) -> LaunchOptions:
    """The job on the hosts that could be used when it was to be started anew.

    Raises:
        HostsUnusable, HostsRefused: `error`, if it is the first start, or if all hosts are needed.
    """
    if options.generation == 0 or options.min_ranks is None:
        raise error
    left = _without(options, error.nodes)
    if left is None:
        _say_too_few(options)
        raise error
    return left


def _without(options: LaunchOptions, nodes: Collection[int]) -> LaunchOptions | None:
    """The job without some of its hosts; None if too few ranks would be left."""
    slots = [count_slots(options, host) for host in options.hosts]
    left = [Host(host.name, count) for node, (host, count) in enumerate(zip(options.hosts, slots, strict=True)) if node not in nodes]
    ranks = min(sum(host.slots or 0 for host in left), options.nproc or sum(slots))
    return replace(options, hosts=tuple(left), nproc=ranks, nproc_per_node=None) if ranks >= (options.min_ranks or 1) else None


def _say_too_few(options: LaunchOptions) -> None:
    say(f"not started anew: fewer than --min-ranks {options.min_ranks} are left without the hosts that were lost")
