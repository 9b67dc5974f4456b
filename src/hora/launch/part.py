"""A launcher's part of a job: its ranks on this node. Opens what it needs, runs it to its end, and closes it again."""

import errno
import os
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from hora import env
from hora.errors import LaunchError
from hora.launch import hang_report, host, pmi
from hora.launch.binding import cores_of_ranks
from hora.launch.display import Ranks
from hora.launch.guardian import Guardian
from hora.launch.inbox import Inbox, Interrupted
from hora.launch.job_directory import base_directory, job_directory, sweep
from hora.launch.job_events import Finish
from hora.launch.local import LocalRanks, adopting_orphans
from hora.launch.lookout import Lookout
from hora.launch.loop import Loop, Node
from hora.launch.meeting import Meeting
from hora.launch.options import LaunchOptions
from hora.launch.others import Others
from hora.launch.plan import JobFacts, Layout, RankPlan, plan_ranks
from hora.launch.scout import Scout
from hora.launch.spares import Spares
from hora.launch.supervisor import Patience, Supervisor
from hora.launch.watch import Watch
from hora.launch.watcher import Watcher
from hora.rendezvous.key import write_key

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Of the few small files of a job. Logs that have no room are told where they are written, and end nothing."""


class Shown(NamedTuple):
    """The output of the ranks, and where their logs are, for people."""

    display: Ranks
    log_dir: Path


@dataclass(frozen=True)
class Part:
    """What differs between a launcher of one node, that of several hosts, and the agents of the latter.

    Args:
        command: of each rank.
        meet: brings this launcher together with the others, given its private directory.
        show: opens the output of the ranks.
        explain: what to say in the end, of how the job ended and the processes that could not be killed.
        master_addr: where rank 0 is.
        interface: network interface for the ranks' sockets; None leaves the choice to them.
        name: of this node, for people.
        others: launchers that this one has started.
        spares: processes that ranks may come to be.
        scout: looks for other hosts.
    """

    layout: Layout
    command: list[str]
    meet: Callable[[Path, ExitStack], Meeting]
    show: Callable[[Meeting, ExitStack], Shown]
    explain: Callable[[Finish, list[int]], str]
    master_addr: str
    interface: str | None = None
    name: str = field(default_factory=socket.gethostname)
    others: Others = field(default_factory=Others)
    spares: Spares = field(default_factory=Spares)
    scout: Scout = field(default_factory=Scout)


def as_launcher(work: Callable[[Inbox, ExitStack], Finish]) -> Finish:
    """Does `work`, which says how the job ended, with the signals and orphans of this process its own; what it opens is closed in the end.

    Raises:
        LaunchError: this machine does not have what the job needs.
    """
    try:
        with Inbox() as inbox, adopting_orphans(), ExitStack() as release:
            finish = work(inbox, release)
    except OSError as error:
        remedy = f"; make room in {base_directory()}, or set TMPDIR to another place" if error.errno in _NO_ROOM else ""
        raise LaunchError(f"the job needs something of this machine that it cannot have: {error}{remedy}") from error
    except Interrupted as interrupted:
        return Finish(interrupted.exit_code, None)
    return replace(finish, asked=inbox.end_asked)  # also while all was being closed: there may be another start


def run_part(options: LaunchOptions, part: Part, inbox: Inbox, release: ExitStack) -> Finish:
    """Runs the ranks to their end, and says how it was. What was opened is closed with `release`."""
    loop, log_dir = _open(options, part, inbox, release)
    finish, left = loop.run()
    if options.kept_dir is not None and env.fleeting_mark(options.kept_dir, options.generation).exists():
        finish = replace(finish, fleeting=True)
    with inbox.interruptible():
        say(part.explain(finish, left))
    return replace(finish, logs=str(log_dir))


def say(text: str) -> None:
    """Says something to people, if there is something to say."""
    if text:
        with suppress(OSError):  # nobody may be left to read it
            sys.stderr.write(f"hora: {text}\n")
            sys.stderr.flush()


def _open(options: LaunchOptions, part: Part, inbox: Inbox, release: ExitStack) -> tuple[Loop, Path]:
    """Opens what the job needs, to be closed with `release` in the opposite order; with it, where the logs are."""
    layout = part.layout
    sweep(base_directory())
    directory = release.enter_context(job_directory(base_directory(), part.spares.name_directory()))
    mark = os.fsencode(f"{env.JOB_DIR}={directory}") if sys.platform == "linux" and not env.portable_only() else b""
    guardian = Guardian([directory, *([] if options.kept_dir is None else [options.kept_dir])], mark)
    release.callback(guardian.dismiss)
    part.others.guard(guardian)
    for outliving in (part.spares, part.scout):
        outliving.guard(guardian)
        release.callback(outliving.guard, None)
    # Before the guardian goes, so that there is no moment in which nobody would remove it.
    release.callback(shutil.rmtree, directory, ignore_errors=True)
    meeting = part.meet(directory, release)
    write_key(directory / "key", meeting.key)
    display, log_dir = part.show(meeting, release)
    release.callback(display.close)
    plans = plan_ranks(
        layout, part.command, _facts(options, part, meeting, directory), {**os.environ, **options.exports}, host.count_cores()
    )
    plans = _bound(plans, cores_of_ranks(options.bind, layout.ranks_per_node))
    if options.mpi:
        plans = _managed(plans, release.enter_context(pmi.ProcessManager(layout.world_size)))
    if options.verbose and plans:
        say(f"job {meeting.job_id} with OMP_NUM_THREADS={plans[0].environ['OMP_NUM_THREADS']}")
    patience = Patience(grace_s=options.grace_s)
    supervisor = Supervisor(layout.ranks, node_rank=layout.node_rank, num_nodes=layout.num_launchers, patience=patience)
    ranks = LocalRanks(guardian, mark, [part.others, part.spares, part.scout], part.spares)
    watch = Watch(options.deadlines, part.name)
    watcher = Watcher(watch, Lookout(ranks, directory), meeting.line, layout.node_rank, layout.num_launchers, log_dir / hang_report.FILE)
    node = Node(plans, ranks, display, log_dir, part.name, part.others, part.spares, part.scout)
    return Loop(supervisor, watcher, node, meeting.line, inbox), log_dir


def _bound(plans: list[RankPlan], cores: list[frozenset[int]] | None) -> list[RankPlan]:
    """The plans, with the cores of each rank."""
    return plans if cores is None else [replace(plan, cores=own) for plan, own in zip(plans, cores, strict=True)]


def _managed(plans: list[RankPlan], manager: pmi.ProcessManager) -> list[RankPlan]:
    """The plans, with the way to MPI's process manager."""
    return [
        replace(plan, environ={**plan.environ, **manager.environ(plan.rank)}, descriptors=(manager.descriptor(plan.rank),))
        for plan in plans
    ]


def _facts(options: LaunchOptions, part: Part, meeting: Meeting, directory: Path) -> JobFacts:
    return JobFacts(
        job_id=meeting.job_id,
        job_dir=str(directory),
        rendezvous=meeting.rendezvous,
        key_file=str(directory / "key"),
        master_addr=part.master_addr,
        master_port=meeting.script_port,
        launcher_pid=os.getpid(),
        logical_ranks=options.logical_ranks,
        shared_dir=None if options.shared_dir is None else str(options.shared_dir.absolute()),
        interface=part.interface,
        mpi=options.mpi,
        generation=options.generation,
        kept_dir=None if options.kept_dir is None else str(options.kept_dir),
    )
