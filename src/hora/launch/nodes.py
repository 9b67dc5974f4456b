"""How the launchers of several nodes meet: at a port of node 0, with a key derived from the one that their user has on all nodes.

Node 0 serves the rendezvous and says what the job is; see `join` for how the others come, `agent` for how they talk afterwards.
"""

import hashlib
import hmac
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import hora
from hora.errors import ConfigError, LaunchError
from hora.launch import ports
from hora.launch.agent import Agent
from hora.launch.join import JobRecord, NodeRecord, found_job, join
from hora.launch.meeting import Deliver, Meeting, new_job_id
from hora.launch.options import LaunchOptions
from hora.launch.plan import Layout
from hora.log import get_logger
from hora.rendezvous.client import Client
from hora.rendezvous.key import read_key, user_key
from hora.rendezvous.server import Server

DEFAULT_PORT = 29500
"""Port of node 0 when the user names none."""

_CALL_S = 10.0
_SILENT_S = 5.0


def meet_nodes(options: LaunchOptions, layout: Layout, deliver: Deliver, release: ExitStack) -> Meeting:
    """Opens the rendezvous on node 0, or joins it; what was opened is closed with `release`. What is published goes to `deliver`.

    Collective: the launchers of all nodes call it.

    Raises:
        ConfigError: node 0 cannot listen there, or a node does not fit the others.
        LaunchError: node 0 or another node did not come in time, or has another key.
    """
    port = options.master_port or DEFAULT_PORT
    key = _derive_key(user_key() if options.key_file is None else read_key(options.key_file), port)
    address = f"tcp://[{options.master_addr}]:{port}" if ":" in options.master_addr else f"tcp://{options.master_addr}:{port}"
    mine = NodeRecord(socket.gethostname(), os.getpid(), layout.num_nodes, layout.ranks_per_node, hora.__version__)
    if layout.node_rank == 0:
        check_reachable(options.master_addr, release.enter_context(_serve(address, key)).address)
    with _long_wait_told(layout, address, options.join_timeout_s):
        client = _connect(address, key, layout.node_rank, options.join_timeout_s)
        release.callback(client.close)
        if layout.node_rank == 0:
            found_job(client, JobRecord(new_job_id(), release.enter_context(ports.reserved_port(None)), mine))
        try:
            job = join(client, layout, mine, options.join_timeout_s)
        except ConnectionError as error:
            raise LaunchError(f"node 0 at {address} went away while the nodes were joining; start all nodes anew") from error
    agent = Agent(client, layout.node_rank, layout.num_nodes, deliver)
    release.callback(agent.close)
    return Meeting(job.job_id, address, key, job.script_port, agent)


def check_reachable(name: str, address: str) -> None:
    """Refuses a name that leads to this machine's loopback, where no other node comes, unless loopback is what was asked for.

    Raises:
        ConfigError: many systems keep their own host name at 127.0.1.1.
    """
    if _is_loopback(address) and not name.startswith(("127.", "::1", "localhost")):
        raise ConfigError(
            f"--master-addr {name} must be an address by which other nodes reach node 0, but is {address} on node 0 itself; "
            "give the address of its network interface on all nodes"
        )


@contextmanager
def _long_wait_told(layout: Layout, address: str, timeout_s: float) -> Iterator[None]:
    """Says once where this node waits for the others, if they have not come within some seconds."""
    hint = ", which is this machine's own loopback: launchers of other machines need --master-addr" if _is_loopback(address) else ""
    words = "node %d of %d waits for the others at %s%s; %g s at most (--join-timeout)"
    told = threading.Timer(
        min(_SILENT_S, timeout_s / 2), get_logger().warning, (words, layout.node_rank, layout.num_nodes, address, hint, timeout_s)
    )
    told.daemon = True
    told.start()
    try:
        yield
    finally:
        told.cancel()


def _is_loopback(address: str) -> bool:
    return address.startswith(("tcp://127.", "tcp://[::1]"))


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
