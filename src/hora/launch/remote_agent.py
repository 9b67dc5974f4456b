"""The agent: a launcher that another one, on another host, has started through a remote shell (`python -m hora.launch.remote_agent`).

It learns everything on standard input: first what is to run, which it compares with what is there, then, when all hosts have answered, its
part of the job and the job's key. From then on it is a launcher like any other. When its input ends, it ends its ranks.
"""

import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import hora
from hora.errors import ConfigError, HoraError, LaunchError
from hora.launch import host, interfaces, ports, report
from hora.launch.agent import Agent
from hora.launch.channel import Channel, Relay
from hora.launch.deadlines import Deadlines
from hora.launch.inbox import Inbox
from hora.launch.job_events import Finish, NodeLost
from hora.launch.join import NodeRecord, take_place
from hora.launch.meeting import Meeting
from hora.launch.options import LaunchOptions
from hora.launch.part import Part, Shown, as_launcher, run_part
from hora.launch.plan import Layout
from hora.launch.target import rank_command
from hora.launch.wire import from_text
from hora.rendezvous.client import Client

_FIRST_WORD_S, _CONNECT_S, _CALL_S = 60.0, 20.0, 10.0
_MAX_WAIT_S = 600.0


def main() -> int:
    """Serves one launcher; returns the exit code of the job."""
    channel = Channel()
    try:
        return as_launcher(partial(_serve, channel)).exit_code
    except (HoraError, OSError) as error:
        with suppress(OSError):
            channel.say(failed=str(error), refused=str(error), config=isinstance(error, ConfigError))
        return 1


def _serve(channel: Channel, inbox: Inbox, release: ExitStack) -> Finish:
    asked = channel.hear(_FIRST_WORD_S)
    options = _prepare(asked)
    command = rank_command(options.target, options.args, options.kind)
    address = own_address(asked["interface"], asked["towards"])
    port = release.enter_context(ports.reserved_port(None)) if asked["first"] else None
    channel.say(
        cores=host.count_cores(),
        gpus=host.count_gpus({**os.environ, **options.exports}) if asked["counts_gpus"] else 0,
        address=address,
        seen_from=_ssh_connection(0),
        script_port=port,
    )
    part = _part(channel, inbox, options, command, channel.hear(_MAX_WAIT_S), address)
    finish = run_part(options, part, inbox, release)
    channel.say(ended=finish.exit_code)
    return finish


def _prepare(asked: Mapping[str, Any]) -> LaunchOptions:
    """Makes this process's directory and environment what the ranks' are to be.

    Raises:
        ConfigError: they cannot be; or this is another Hora or Python than the launcher's.
    """
    mine = {"hora": hora.__version__, "python": python_version()}
    if differing := [f"{name} is {mine[name]} there but {asked[name]} here" for name in mine if mine[name] != asked[name]]:
        raise ConfigError(f"{' and '.join(differing)}; install the same on both, or name another Python there with --remote-python")
    take_environment(asked["environ"])
    directory = from_text(asked["directory"])
    try:
        os.chdir(directory)
    except OSError as error:
        raise ConfigError(
            f"the directory {directory} must be there too, but: {error.strerror}; make or share it, or name another with --wdir"
        ) from error
    os.environ["PWD"] = directory
    if asked["interface"] is not None:
        ports.require_interface(asked["interface"])
    fields = asked["options"]
    return LaunchOptions(
        target=from_text(fields["target"]),
        args=tuple(map(from_text, fields["args"])),
        kind=fields["kind"],
        grace_s=fields["grace_s"],
        join_timeout_s=fields["join_timeout_s"],
        logical_ranks=fields["logical_ranks"],
        shared_dir=None if fields["shared_dir"] is None else Path(from_text(fields["shared_dir"])),
        exports={from_text(name): from_text(value) for name, value in fields["exports"].items()},
        generation=asked["options"]["generation"],
        bind=fields["bind"],
        deadlines=Deadlines(fields["deadlines"]),
    )


def take_environment(variables: Mapping[str, str]) -> None:
    """Makes the variables that have travelled here this process's, and has programs beside its Python found first."""
    os.environ.update({from_text(name): from_text(value) for name, value in variables.items()})
    os.environ["PATH"] = os.pathsep.join(filter(None, [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]))


def python_version() -> str:
    """The version that must be the same on all hosts."""
    return ".".join(map(str, sys.version_info[:2]))


def own_address(interface: str | None, towards: str | None) -> str | None:
    """The address of this host for the others: of the interface that was named, else on the way to the launcher, else the one that ssh used."""
    if interface is not None:
        return interfaces.address_of(interface)
    return (interfaces.route_to(towards) if towards else None) or _ssh_connection(2)


def _ssh_connection(index: int) -> str | None:
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[index] if len(words) == 4 else None


def _part(channel: Channel, inbox: Inbox, options: LaunchOptions, command: list[str], told: Mapping[str, Any], address: str | None) -> Part:
    layout, server = Layout(tuple(told["ranks_of_nodes"]), told["node_rank"]), told["server"]
    host.make_room(layout.ranks_per_node)

    def lose_launcher() -> None:
        inbox.deliver(NodeLost(server))
        os.kill(os.getpid(), signal.SIGTERM)  # for when nobody looks into the inbox yet

    def meet(_: Path, release: ExitStack) -> Meeting:
        channel.listen(lambda said: os.kill(os.getpid(), said["signal"]), lose_launcher)
        key = bytes.fromhex(told["key"])
        client = _connect(told["rendezvous"], key, told["name"], min(_CONNECT_S, options.join_timeout_s))
        release.callback(client.close)
        mine = NodeRecord(socket.gethostname(), os.getpid(), layout.num_nodes, layout.ranks_per_node, hora.__version__)
        take_place(client, layout, mine, options.join_timeout_s, on_taken=partial(channel.say, connected=True))
        line = Agent(client, layout.node_rank, layout.num_launchers, inbox.deliver, server=server)
        release.callback(line.close)
        return Meeting(told["job_id"], told["rendezvous"], key, told["script_port"], line)

    def show(_: Meeting, __: ExitStack) -> Shown:
        return Shown(Relay(channel, layout.ranks, inbox.wake), Path(from_text(told["log_dir"])))

    return Part(
        layout,
        command,
        meet,
        show,
        lambda _, left: report.explain_survivors(left),
        master_addr=told["master_addr"],
        interface=interfaces.interface_of(address) if address else None,
        name=told["name"],
    )


def _connect(address: str, key: bytes, name: str, timeout_s: float) -> Client:
    try:
        Client(address, key, name=name, timeout_s=timeout_s).close()
        return Client(address, key, name=name, timeout_s=_CALL_S)
    except ConnectionError as error:
        raise LaunchError(
            f"it cannot reach the launcher at {address}: {error.__cause__ or error}; see that no firewall is between them (--master-port fixes the "
            "port), or name the network that both are on with --interface"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
