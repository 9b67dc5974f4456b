"""Records of ranks for tests."""

from dataclasses import replace

from hora.comm.records import Record

_PLAIN = Record(
    rank=0,
    world_size=3,
    node_rank=0,
    local_rank=0,
    host="node1",
    pid=100,
    pid_namespace="",
    started_s=0.5,
    backend="gloo",
    device_type="cpu",
    hora="1",
    torch="2",
    python="3",
    script="none",
    exact="off",
    check_calls=True,
    config={},
    num_gpus=0,
    visible_gpus=None,
)


def record(rank: int, **changes) -> Record:
    """The record of process 100 + `rank` on node1, with `changes`."""
    return replace(_PLAIN, **({"rank": rank, "local_rank": rank, "pid": 100 + rank} | changes))
