"""How the launchers of several nodes come together before they start anything.

Each claims its node's place at the rendezvous of node 0 and compares with node 0 what must be the same everywhere; all go on when all places are
taken. Who does not fit is refused here, with both values, and the others keep waiting for the right one: node 0 says at once that somebody was
refused, since that one may be gone for good.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

from hora.errors import ConfigError, LaunchError, RendezvousTimeout
from hora.launch.plan import Layout
from hora.log import get_logger
from hora.rendezvous.client import Client

LOST = "launch/lost"
"""Key that names the first node whose launcher died. The first loss ends the job, so that one key is enough for the wills of all."""

_JOB = "launch/job"
_REFUSED = "launch/refused/"
_LOOK_S = 0.5
_REFUSALS_TOLD = 10


@dataclass(frozen=True)
class NodeRecord:
    """What a launcher says of itself."""

    host: str
    pid: int
    num_nodes: int
    ranks_per_node: int
    hora: str

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "NodeRecord":
        """What another launcher says, as far as it is known here: another version of Hora may say more, or less, and is to be named as that."""
        known: dict[str, Any] = {field.name: fields.get(field.name) for field in dataclass_fields(cls)}
        return cls(**known)


@dataclass(frozen=True)
class JobRecord:
    """What node 0 says of the job. `script_port` is for scripts that use torch.distributed themselves."""

    job_id: str
    script_port: int
    node_zero: NodeRecord


# What must be the same on all nodes, as the user knows it.
_COMMON = {"num_nodes": "--nnodes", "ranks_per_node": "--nproc-per-node", "hora": "the version of Hora"}


def found_job(client: Client, job: JobRecord) -> None:
    """Says on node 0 what the job is."""
    client.set(_JOB, json.dumps(asdict(job)).encode())


def join(client: Client, layout: Layout, mine: NodeRecord, timeout_s: float) -> JobRecord:
    """Takes this node's place and waits for the others; the place is given back if that fails or is interrupted.

    Collective: the launchers of all nodes call it.

    Raises:
        ConfigError: the place is taken, or this node differs from node 0 in what must be the same.
        RendezvousTimeout: nodes are missing at the deadline; the message names them.
        LaunchError: a launcher that had joined is gone again.
    """
    job = _read_job(client, timeout_s)
    try:
        check_agreement(layout.node_rank, mine, job.node_zero)
        take_place(client, layout, mine, timeout_s)
    except ConfigError as error:
        with suppress(OSError):
            client.set(_REFUSED + secrets.token_hex(8), str(error).encode())
        raise
    return job


def take_place(client: Client, layout: Layout, mine: NodeRecord, timeout_s: float, on_taken: Callable[[], None] = lambda: None) -> None:
    """Takes this launcher's place, calls `on_taken`, and waits for the others; see `join`."""
    end = time.monotonic() + timeout_s
    _claim(client, layout.node_rank, mine)
    try:
        client.set_will(LOST, b"%d" % layout.node_rank)
        on_taken()
        _await_all(client, layout, end, timeout_s)
    except BaseException:
        with suppress(OSError):
            client.delete(_place(layout.node_rank))
        raise


def check_agreement(node_rank: int, mine: NodeRecord, node_zero: NodeRecord) -> None:
    """Refuses a node that differs from node 0 in what must be the same everywhere.

    Raises:
        ConfigError: names each difference, with both values.
    """
    differences = [
        f"{name} is {getattr(mine, field)} on node {node_rank} ({mine.host}) but {getattr(node_zero, field)} on node 0 ({node_zero.host})"
        for field, name in _COMMON.items()
        if getattr(mine, field) != getattr(node_zero, field)
    ]
    if differences:
        raise ConfigError("all nodes must be started alike: " + "; ".join(differences))


def _place(node_rank: int) -> str:
    return f"launch/node/{node_rank}"


def _read_job(client: Client, timeout_s: float) -> JobRecord:
    try:
        fields = json.loads(client.get(_JOB, timeout_s))
    except TimeoutError as error:
        raise RendezvousTimeout(f"node 0 did not say within {timeout_s:g} s what the job is; start it again") from error
    return JobRecord(fields.get("job_id"), fields.get("script_port"), NodeRecord.read(fields.get("node_zero", {})))


def _claim(client: Client, node_rank: int, mine: NodeRecord) -> None:
    claim = json.dumps(asdict(mine)).encode()
    holder = client.compare_set(_place(node_rank), b"", claim)
    if holder != claim:
        other = NodeRecord.read(json.loads(holder))
        raise ConfigError(
            f"two launchers claim --node-rank {node_rank}: process {other.pid} on {other.host}, which was first, and process {mine.pid} on "
            f"{mine.host}; give each node a rank of its own"
        )


def _await_all(client: Client, layout: Layout, end: float, timeout_s: float) -> None:
    places = [_place(node) for node in range(layout.num_launchers)]
    told: set[str] = set()
    while not client.check(places):
        with suppress(TimeoutError):
            client.wait(places, min(_LOOK_S, max(0.0, end - time.monotonic())))
            return
        if layout.node_rank == 0:
            told |= _tell_of_refused(client, told, end)
        if client.check([LOST]):
            raise LaunchError(f"the launcher of node {client.get(LOST).decode()} joined and is gone again; start all nodes anew")
        if time.monotonic() >= end:
            missing = [node for node, place in enumerate(places) if not client.check([place])]
            raise RendezvousTimeout(
                f"waited {timeout_s:g} s for {_say_nodes(missing)} of {layout.num_nodes}; start `hora run` there with --node-rank and the same "
                "--master-addr, --master-port and --nnodes, or give more time with --join-timeout"
            )


def _tell_of_refused(client: Client, told: set[str], end: float) -> set[str]:
    """Says of launchers that were refused, and are not in `told`, why; returns the keys of all that were found. One may be started again and again
    by whoever watches over it: after the first ten only the 100th, 1000th ... are spoken of.
    """
    found = set(client.keys(_REFUSED)) - told
    for number, key in enumerate(sorted(found), start=len(told) + 1):
        if number > _REFUSALS_TOLD and str(number).strip("0") != "1":
            continue
        why = client.get(key).decode(errors="replace")
        left_s = max(0.0, end - time.monotonic())
        get_logger().warning(
            "a node came and was refused; it can be started anew within %.0f s: %s (refused so far: %d)", left_s, why, number
        )
    return found


def _say_nodes(nodes: Sequence[int]) -> str:
    return ("node " if len(nodes) == 1 else "nodes ") + ", ".join(map(str, nodes))
