"""Runs a job on this node, from the options to the exit code: opens what it needs, then goes round between processes and supervisor."""

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from hora import env
from hora.errors import LaunchError
from hora.launch import host, pmi, ports, report
from hora.launch.display import Display
from hora.launch.guardian import Guardian
from hora.launch.inbox import Inbox, Interrupted
from hora.launch.job_directory import base_directory, job_directory, sweep
from hora.launch.local import LocalRanks, adopting_orphans
from hora.launch.logs import log_directory
from hora.launch.meeting import Line, Meeting, meet
from hora.launch.plan import JobFacts, LaunchOptions, Layout, RankPlan, count_ranks, plan_ranks
from hora.launch.supervisor import (
    Action,
    Event,
    FailureSeen,
    Finish,
    Patience,
    Publish,
    RankDoomed,
    RankEnded,
    SignalArrived,
    SignalRanks,
    StartRanks,
    Supervisor,
)
from hora.launch.target import rank_command
from hora.rendezvous.key import write_key


def launch(options: LaunchOptions) -> int:
    """Runs the job (this node's part of it) and returns its exit code, the same on all nodes.

    0 when all ranks ended well; the first failing rank's own code, or 128 + the signal that killed it; 75 when ranks ended early after saving;
    130 after Ctrl-C; 143 after SIGTERM without a save. To be called from the main thread.

    Collective: the launchers of all nodes call it.

    Raises:
        ConfigError: something that the user gave is wrong; nothing has been started.
        LaunchError: the nodes did not come together, or a process could not be started.
    """
    cores = host.count_cores()
    gpus = host.count_gpus() if options.counts_gpus else 0
    layout = Layout(options.num_nodes, options.node_rank, count_ranks(options, cores=cores, gpus=gpus))
    command = rank_command(options.target, options.args, options.kind, mpi=options.mpi)
    if options.mpi:
        pmi.require_mpi()
    host.make_room(layout.ranks_per_node)
    ports.resolve(options.master_addr)
    try:
        with Inbox() as inbox, adopting_orphans(), ExitStack() as release:
            return _open(options, layout, command, cores, inbox, release).run()
    except OSError as error:
        raise LaunchError(f"the job needs something of this machine that it cannot have: {error}") from error
    except Interrupted as interrupted:
        return interrupted.exit_code


def _open(options: LaunchOptions, layout: Layout, command: list[str], cores: int, inbox: Inbox, release: ExitStack) -> "_Job":
    """Opens what the job needs, to be closed with `release` in the opposite order."""
    sweep(base_directory())
    directory = release.enter_context(job_directory(base_directory()))
    mark = os.fsencode(f"{env.JOB_DIR}={directory}") if sys.platform == "linux" and not env.portable_only() else b""
    guardian = Guardian(directory, mark)
    release.callback(guardian.dismiss)
    # Before the guardian goes, so that there is no moment in which nobody would remove it.
    release.callback(shutil.rmtree, directory, ignore_errors=True)
    meeting = meet(options, layout, directory, inbox.deliver, release)
    write_key(directory / "key", meeting.key)
    log_dir = release.enter_context(log_directory(options.log_dir, meeting.job_id))
    display = Display(layout, log_dir, quiet=options.quiet, on_end=inbox.wake)
    release.callback(display.close)
    plans = plan_ranks(layout, command, _facts(options, meeting, directory), {**os.environ, **options.exports}, cores)
    if options.mpi:
        plans = _managed(plans, release.enter_context(pmi.ProcessManager(layout.world_size)))
    if options.verbose:
        _say(f"job {meeting.job_id} with OMP_NUM_THREADS={plans[0].environ['OMP_NUM_THREADS']}")
    if options.verbose or (options.log_dir is not None and not options.quiet):
        _say(f"logs in {log_dir}")
    patience = Patience(grace_s=options.grace_s)
    supervisor = Supervisor(layout.ranks, node_rank=layout.node_rank, num_nodes=layout.num_nodes, patience=patience)
    return _Job(plans, supervisor, LocalRanks(guardian, mark), display, meeting.line, inbox)


def _managed(plans: list[RankPlan], manager: pmi.ProcessManager) -> list[RankPlan]:
    """The plans, with the way to MPI's process manager."""
    return [
        replace(plan, environ={**plan.environ, **manager.environ(plan.rank)}, descriptors=(manager.descriptor(plan.rank),))
        for plan in plans
    ]


def _facts(options: LaunchOptions, meeting: Meeting, directory: Path) -> JobFacts:
    return JobFacts(
        job_id=meeting.job_id,
        job_dir=str(directory),
        rendezvous=meeting.rendezvous,
        key_file=str(directory / "key"),
        master_addr=options.master_addr,
        master_port=meeting.script_port,
        launcher_pid=os.getpid(),
        logical_ranks=options.logical_ranks,
        shared_dir=None if options.shared_dir is None else str(options.shared_dir.absolute()),
        loopback=ports.loopback_interface() if options.num_nodes == 1 else None,
        mpi=options.mpi,
    )


class _Job:
    """Carries the supervisor's actions out and brings it the events, until it says that the job is over."""

    def __init__(
        self,
        plans: list[RankPlan],
        supervisor: Supervisor,
        ranks: LocalRanks,
        display: Display,
        line: Line,
        inbox: Inbox,
    ) -> None:
        self._plans = plans
        self._supervisor = supervisor
        self._ranks = ranks
        self._display = display
        self._line = line
        self._inbox = inbox
        self._memory_kills = host.count_memory_kills()
        self._finish: Finish | None = None

    def run(self) -> int:
        """Runs the ranks to their end; returns the exit code."""
        self._inbox.collect()
        try:
            self._do(self._supervisor.start())
            while self._finish is None:
                self._turn()
        finally:
            left = self._ranks.clear()
            self._show_rest()
        with self._inbox.interruptible():
            _say(report.explain_end(self._finish, left))
        return self._finish.exit_code

    def _turn(self) -> None:
        """Waits for something to happen and does what the supervisor says."""
        for event in self._await_events():
            self._do(self._supervisor.handle(event, time.monotonic()))
        if (deadline := self._supervisor.deadline) is not None and time.monotonic() >= deadline:
            self._look_for_the_doomed()
            self._do(self._supervisor.tick(time.monotonic()))

    def _look_for_the_doomed(self) -> None:
        """A large process may take longer to end after its traceback than others take to notice that it is going."""
        for rank in self._ranks.alive():
            if self._supervisor.suspicious and report.is_doomed(self._display.tail(rank)):
                self._do(self._supervisor.handle(RankDoomed(rank), time.monotonic()))

    def _await_events(self) -> Iterable[Event]:
        deadline = self._supervisor.deadline
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        for signum in self._inbox.wait(timeout_s):
            yield SignalArrived(signum)
        for rank, code in self._ranks.reap():
            yield RankEnded(rank, code, self._blames_peer(rank, code))
        yield from self._inbox.delivered()

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case StartRanks():
                    self._ranks.start(self._plans, self._display)
                case SignalRanks(signum):
                    self._ranks.signal(signum)
                case Publish(event):
                    self._line.publish(self._with_report(event) if isinstance(event, FailureSeen) else event)
                case Finish():
                    self._finish = self._finish or action

    def _blames_peer(self, rank: int, code: int) -> bool:
        # NCCL's watchdog aborts the process when another rank is gone; any other signal came from outside.
        return (code > 0 or code == -signal.SIGABRT) and report.blames_peer(self._display.tail(rank))

    def _with_report(self, failure: FailureSeen) -> FailureSeen:
        kills = host.count_memory_kills()
        casualty = report.Casualty(
            rank=failure.rank,
            host=socket.gethostname(),
            pid=self._ranks.pid(failure.rank),
            code=failure.code,
            log=str(self._display.log_path(failure.rank)),
            tail=self._display.tail(failure.rank),
            memory_kills=None if kills is None or self._memory_kills is None else kills - self._memory_kills,
        )
        return replace(failure, report=report.describe(casualty))

    def _show_rest(self) -> None:
        """Waits until the screen has taken everything; a user who does not want to wait presses Ctrl-C."""
        self._display.finish()
        with self._inbox.interruptible():
            while not self._display.ended and signal.SIGINT not in self._inbox.wait(None):
                pass


def _say(text: str) -> None:
    if text:
        with suppress(OSError):  # nobody may be left to read it
            sys.stderr.write(f"hora: {text}\n")
            sys.stderr.flush()
