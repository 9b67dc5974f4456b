"""Where the processes of a job meet: the rendezvous that the launcher of node 0 serves, and the line to the launchers of other nodes.

On one node it is a Unix socket in the job's private directory (a port of loopback where there are none) with a key of the job's own. On several it
is a port of node 0, with a key that each launcher derives from the key that its user has on all nodes.
"""

import hashlib
import hmac
import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import hora
from hora.errors import ConfigError, LaunchError
from hora.launch import ports
from hora.launch.agent import Agent, Alone, Deliver
from hora.launch.join import JobRecord, NodeRecord, found_job, join
from hora.launch.plan import LaunchOptions, Layout
from hora.rendezvous.address import local_address
from hora.rendezvous.client import Client
from hora.rendezvous.key import new_key, read_key, user_key
from hora.rendezvous.server import Server

DEFAULT_PORT = 29500
"""Port of node 0 when there are several nodes and the user names none."""

_CALL_S = 10.0


@dataclass(frozen=True)
class Meeting:
    """What the launcher knows of its job once all nodes have joined."""

    job_id: str
    rendezvous: str
    key: bytes = field(repr=False)
    script_port: int
    line: Alone | Agent


def meet(options: LaunchOptions, layout: Layout, directory: Path, deliver: Deliver, release: ExitStack) -> Meeting:
    """Opens the job's rendezvous, or joins it; what was opened is closed with `release`. What others publish goes to `deliver`.

    Collective: the launchers of all nodes call it.
    """
    if layout.num_nodes == 1:
        return _meet_here(options, directory, deliver, release)
    return _meet_nodes(options, layout, deliver, release)


def _meet_here(options: LaunchOptions, directory: Path, deliver: Deliver, release: ExitStack) -> Meeting:
    key, port = new_key(), release.enter_context(ports.reserved_port(options.master_port))
    server = release.enter_context(Server(local_address(directory), key))
    return Meeting(_new_job_id(), server.address, key, port, Alone(deliver))


def _meet_nodes(options: LaunchOptions, layout: Layout, deliver: Deliver, release: ExitStack) -> Meeting:
    port = options.master_port or DEFAULT_PORT
    key = _derive_key(user_key() if options.key_file is None else read_key(options.key_file), port)
    address = f"tcp://[{options.master_addr}]:{port}" if ":" in options.master_addr else f"tcp://{options.master_addr}:{port}"
    mine = NodeRecord(socket.gethostname(), os.getpid(), layout.num_nodes, layout.ranks_per_node, hora.__version__)
    if layout.node_rank == 0:
        release.enter_context(_serve(address, key))
    client = _connect(address, key, layout.node_rank, options.join_timeout_s)
    release.callback(client.close)
    if layout.node_rank == 0:
        found_job(client, JobRecord(_new_job_id(), release.enter_context(ports.reserved_port(None)), mine))
    try:
        job = join(client, layout, mine, options.join_timeout_s)
    except ConnectionError as error:
        raise LaunchError(f"node 0 at {address} went away while the nodes were joining; start all nodes anew") from error
    agent = Agent(client, layout.node_rank, layout.num_nodes, deliver)
    release.callback(agent.close)
    return Meeting(job.job_id, address, key, job.script_port, agent)


def _serve(address: str, key: bytes) -> Server:
    try:
        return Server(address, key).start()
    except LaunchError as error:
        raise ConfigError(f"{error} (--master-addr must be an address of node 0, --master-port a free port of it)") from error


def _connect(address: str, key: bytes, node_rank: int, timeout_s: float) -> Client:
    """Connects when node 0 is there; calls on the returned client have a shorter deadline than this."""
    name = f"the launcher of node {node_rank}"
    try:
        Client(address, key, name=name, timeout_s=timeout_s).close()
    except ConnectionError as error:
        raise LaunchError(
            f"node 0 did not answer at {address} within {timeout_s:g} s; start it there with --node-rank 0 and the same --master-port"
        ) from error
    return Client(address, key, name=name, timeout_s=_CALL_S)


def _derive_key(key: bytes, port: int) -> bytes:
    """The job's key: the ranks, which get it, do not learn the user's."""
    return hmac.digest(key, b"hora job at port %d" % port, hashlib.sha256)


def _new_job_id() -> str:
    return os.urandom(8).hex()
