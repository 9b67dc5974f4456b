"""Runs a job whose launchers are started by hand, one on each node, or on this node alone: from the options to the exit code."""

import os
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hora.errors import ConfigError
from hora.launch import host, pmi, ports, report
from hora.launch.child import on_linux
from hora.launch.display import Display
from hora.launch.inbox import Inbox
from hora.launch.job_events import Finish
from hora.launch.logs import log_directory, open_streams
from hora.launch.meeting import Meeting, meet
from hora.launch.options import LaunchOptions
from hora.launch.part import Part, Shown, as_launcher, run_part, say
from hora.launch.plan import Layout, count_ranks
from hora.launch.restarts import run_with_restarts
from hora.launch.scout import Scout
from hora.launch.sinks import open_rank_logs
from hora.launch.spares import Spares
from hora.launch.target import rank_command


def launch(options: LaunchOptions) -> int:
    """Runs the job (this node's part of it) and returns its exit code, the same on all nodes.

    With `max_restarts` a job that fails is started anew, so many times in all (`restarts`).

    0 when all ranks ended well; the first failing rank's own code, or 128 + the signal that killed it; 75 when ranks ended early after saving;
    130 after Ctrl-C; 143 after SIGTERM without a save. To be called from the main thread.

    Collective: the launchers of all nodes call it; with `hosts` this one starts the others.

    Raises:
        ConfigError: something that the user gave is wrong; nothing has been started.
        LaunchError: the nodes did not come together, or a process could not be started.
    """
    if options.wdir is not None:
        return _launch_in(options.wdir, options)
    with closing(_spares(options)) as spares, closing(_scout(options)) as scout, ExitStack() as until_over:
        return run_with_restarts(options, partial(launch_once, spares=spares, scout=scout, until_over=until_over), scout)


def launch_once(options: LaunchOptions, spares: Spares, scout: Scout, until_over: ExitStack) -> Finish:
    """Runs the job to its end, whatever that is; see `launch`. `until_over` is closed when it is not started anew any more."""
    if options.hosts:
        from hora.launch.head import launch_on_hosts  # here, because a job of one node should not wait for it to load

        return launch_on_hosts(options, scout, until_over)
    cores = host.count_cores()
    gpus = host.count_gpus() if options.counts_gpus else 0
    layout = Layout.even(options.num_nodes, options.node_rank, count_ranks(options, cores=cores, gpus=gpus))
    command = rank_command(options.target, options.args, options.kind, mpi=options.mpi)
    if options.mpi:
        pmi.require_mpi()
    host.make_room(layout.ranks_per_node)
    ports.resolve(options.master_addr)
    outliving = _Outliving(spares, scout, until_over)
    return as_launcher(lambda inbox, release: run_part(options, _part(options, layout, command, inbox, outliving), inbox, release))


def _launch_in(directory: str, options: LaunchOptions) -> int:
    """Launches from another directory; what else the options name is meant from this one."""
    here = {
        name: path.absolute()
        for name in ("log_dir", "output_dir", "key_file", "shared_dir")
        if (path := getattr(options, name)) is not None
    }
    before = os.getcwd()
    try:
        os.chdir(directory)
    except OSError as error:
        raise ConfigError(f"--wdir {directory} must be a directory, but: {error.strerror}; check the name") from error
    try:
        return launch(replace(options, wdir=None, **here))
    finally:
        os.chdir(before)


def _spares(options: LaunchOptions) -> Spares:
    if not options.warm_spares or not on_linux():
        return Spares()
    from hora.launch.warm_spares import WarmSpares  # here, because other jobs should not wait for it to load

    def tell(count: int) -> None:
        if options.verbose:
            say(f"spares for {count} ranks are ready")

    return WarmSpares(options.max_restarts, tell)


def _scout(options: LaunchOptions) -> Scout:
    if options.min_ranks is None and not options.elastic:
        return Scout()
    from hora.launch.host_scout import HostScout

    return HostScout(options)


class _Outliving(NamedTuple):
    """What outlives a generation."""

    spares: Spares
    scout: Scout
    until_over: ExitStack


def _part(options: LaunchOptions, layout: Layout, command: list[str], inbox: Inbox, outliving: _Outliving) -> Part:
    def meet_others(directory: Path, release: ExitStack) -> Meeting:
        if layout.num_nodes > 1:
            _require_logs(options, layout)  # now: the others may come late, and would come in vain
        return meet(options, layout, directory, inbox.deliver, release)

    def show(meeting: Meeting, release: ExitStack) -> Shown:
        log_dir = open_logs(options, meeting.job_id, release)
        return Shown(show_ranks(options, layout, log_dir, inbox, outliving.until_over), log_dir)

    master_addr, interface = options.master_addr, _interface(options)
    return Part(layout, command, meet_others, show, _explain, master_addr, interface, spares=outliving.spares, scout=outliving.scout)


def _interface(options: LaunchOptions) -> str | None:
    """Where the ranks' sockets are to be: left to themselves they take what the host's own name leads to, which is often loopback."""
    if options.num_nodes == 1:
        return ports.loopback_interface()
    from hora.launch.interfaces import interface_towards  # here, because a job of one node should not wait for it to load

    return interface_towards(options.master_addr)


def open_logs(options: LaunchOptions, job_id: str, release: ExitStack) -> Path:
    """Makes the directory for the logs, and says where it is if that is of interest."""
    name = f"{job_id}-{options.generation}" if options.generation else job_id
    log_dir = release.enter_context(log_directory(options.log_dir, name, within=options.generation > 0, word=options.log_word))
    if options.verbose or (options.log_dir is not None and not options.quiet):
        say(f"logs in {log_dir}")
    return log_dir


def _require_logs(options: LaunchOptions, layout: Layout) -> None:
    """Opens the logs where the user wants them, and closes them again.

    Raises:
        ConfigError: one cannot be written, or another job writes it.
    """
    with ExitStack() as opened:
        if options.log_dir is not None:
            log_dir = opened.enter_context(log_directory(options.log_dir, "", word=options.log_word))
            for log in open_rank_logs({rank: log_dir / f"rank{rank}.log" for rank in layout.ranks}, options.log_word).values():
                opened.callback(log.close)
        if options.output_dir is not None:
            for log in open_streams(options.output_dir, layout.ranks, layout.world_size).values():
                opened.callback(log.close)


def show_ranks(
    options: LaunchOptions, layout: Layout, log_dir: Path, inbox: Inbox, until_over: ExitStack, remote_ranks: Iterable[int] = ()
) -> Display:
    """Opens the display of the ranks, and their logs, which no other job takes for its own before this one is over, in its later starts either.

    Raises:
        ConfigError: a log cannot be written, or another job writes it.
    """
    display = Display(
        layout,
        log_dir,
        quiet=options.quiet,
        on_end=inbox.wake,
        remote_ranks=remote_ranks,
        output_dir=options.output_dir,
        log_word=options.log_word,
    )
    if options.log_dir is not None and options.generation == 0 and options.kept_dir is not None:
        display.hold_logs(until_over)
    return display


def _explain(finish: Finish, left: list[int]) -> str:
    return "\n".join(filter(None, [report.explain_end(finish), report.explain_survivors(left)]))
