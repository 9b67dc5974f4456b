"""Runs a job on several hosts from one of them, or from elsewhere: starts an agent on each other host, and serves the job's rendezvous.

Nothing runs anywhere until every host has said that it has what the job needs. The launcher takes part like that of any node, with the ranks of
this machine if it is one of the hosts, else with none. See `remotes` for the agents as they are seen from here, `remote_agent` for what they do.
"""

import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hora
from hora.launch import host, interfaces, ports, report
from hora.launch.agent import Agent
from hora.launch.asking import Answers, ask_hosts
from hora.launch.dealing import deal_ranks, find_here
from hora.launch.inbox import Inbox
from hora.launch.job import launch_once, open_logs, show_ranks
from hora.launch.job_events import Finish, NodeLost, StopAsked
from hora.launch.join import NodeRecord, take_place
from hora.launch.meeting import Meeting, new_job_id
from hora.launch.options import LaunchOptions
from hora.launch.part import Part, Shown, as_launcher, run_part
from hora.launch.plan import Layout
from hora.launch.remotes import Remotes, dial
from hora.launch.scout import Scout
from hora.launch.spares import Spares
from hora.launch.target import rank_command
from hora.launch.wire import as_text
from hora.rendezvous.address import TcpAddress
from hora.rendezvous.client import Client
from hora.rendezvous.key import new_key
from hora.rendezvous.server import Server

_CALL_S = 10.0


def launch_on_hosts(options: LaunchOptions, scout: Scout, until_over: ExitStack) -> Finish:
    """Runs the job on `options.hosts` once; see `job.launch`.

    Raises:
        ConfigError: something that the user gave is wrong, here or on a host; nothing has been started.
        LaunchError: a host cannot be used.
    """
    here = find_here(options.hosts, ports.is_this_machine)
    counts = None if options.counts_host else deal_ranks(options)
    used = [index for index in range(len(options.hosts)) if counts is None or counts[index]]
    if set(used) <= set(here):
        alone = replace(options, hosts=(), min_ranks=None, max_ranks=None, host_discovery=())
        return launch_once(alone if counts is None else replace(alone, nproc=sum(counts), nproc_per_node=None), Spares(), scout, until_over)
    at = next((index for index in here if index in used), None)
    return as_launcher(lambda inbox, release: _run(options, used, at, (scout, until_over), inbox, release))


def _run(
    options: LaunchOptions, used: list[int], here: int | None, outliving: tuple[Scout, ExitStack], inbox: Inbox, release: ExitStack
) -> Finish:
    scout, until_over = outliving
    command = [] if here is None else rank_command(options.target, options.args, options.kind)
    remotes = release.enter_context(Remotes())
    with inbox.deferring():
        for node in used:
            if node != here:
                remotes.add(node, dial(options, options.hosts[node].name))
    answers = ask_hosts(options, remotes, here)
    head = _Head(options, answers, remotes, inbox, until_over)
    host.make_room(max(head.layout.ranks_per_node, len(used) + head.layout.world_size // 2))  # the logs of each rank of the job
    name = options.hosts[here].name if here is not None else socket.gethostname()
    interface = options.interface or interfaces.interface_of(answers.address)
    part = Part(head.layout, command, head.meet, head.show, head.explain, answers.master_addr, interface, name, remotes, scout=scout)
    return head.true_end(run_part(options, part, inbox, release))


@dataclass
class _Head:
    """What a launcher does that has started the others."""

    options: LaunchOptions
    answers: Answers
    remotes: Remotes
    inbox: Inbox
    until_over: ExitStack
    job_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.job_id = self.options.job_id or new_job_id()
        counts, here = self.answers.counts, self.answers.here
        self.layout = Layout(counts, here) if here is not None else Layout((*counts, 0), len(counts))

    def meet(self, _: Path, release: ExitStack) -> Meeting:
        """Serves the rendezvous, has the agents come, and takes this launcher's own place."""
        options, me = self.options, self.layout.node_rank
        self._log_dir = open_logs(options, self.job_id, release)
        key = new_key()
        server = release.enter_context(Server(str(TcpAddress(self.answers.address, options.master_port or 0)), key).start())
        port = self.answers.script_port or release.enter_context(ports.reserved_port(None))
        self.remotes.ask(
            {node: self._part_of(node, server.address, key, port) for node in self.remotes.nodes}, timeout_s=options.join_timeout_s
        )
        client = Client(server.address, key, name="the launcher", timeout_s=_CALL_S)
        release.callback(client.close)
        mine = NodeRecord(socket.gethostname(), os.getpid(), self.layout.num_nodes, self.layout.ranks_per_node, hora.__version__)
        take_place(client, self.layout, mine, options.join_timeout_s)
        line = Agent(client, me, self.layout.num_launchers, self.inbox.deliver, server=me)
        release.callback(line.close)
        return Meeting(self.job_id, server.address, key, port, line)

    def show(self, _: Meeting, __: ExitStack) -> Shown:
        """Shows the ranks of all hosts, and keeps their logs."""
        everybody = range(self.layout.world_size)
        display = show_ranks(self.options, self.layout, self._log_dir, self.inbox, self.until_over, everybody)
        self.remotes.show_on(display, self.layout.ranks_of, self.inbox.wake)
        return Shown(display, self._log_dir)

    def explain(self, finish: Finish, left: list[int]) -> str:
        """How the job ended, in the words of this launcher, which speaks for all."""
        told = report.explain_end(self.true_end(finish), self.remotes.explain_loss)
        return "\n".join(filter(None, [told, report.explain_survivors(left)]))

    def true_end(self, finish: Finish) -> Finish:
        """An agent that has lost its launcher asks for the end of the job, if it still can: that is the loss of its host, and nobody's wish."""
        if isinstance(finish.cause, StopAsked) and finish.cause.node in self.remotes.lost:
            return replace(finish, exit_code=1, cause=NodeLost(finish.cause.node))
        return finish

    def _part_of(self, node: int, rendezvous: str, key: bytes, port: int) -> dict[str, Any]:
        return {
            "ranks_of_nodes": self.layout.ranks_of_nodes,
            "node_rank": node,
            "server": self.layout.node_rank,
            "name": self.options.hosts[node].name,
            "rendezvous": rendezvous,
            "key": key.hex(),
            "job_id": self.job_id,
            "master_addr": self.answers.master_addr,
            "script_port": port,
            "log_dir": as_text(os.fspath(self._log_dir)),
        }
