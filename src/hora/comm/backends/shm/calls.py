"""What ranks say in the first round of a call that they are about to do, and how a round that fails is explained."""

from enum import IntEnum

import torch

from hora.comm.backends.queued import Failed, Mismatched
from hora.comm.backends.shm.engine import DTYPES, CallWords, Op
from hora.comm.backends.shm.segment import CALL_WORDS, Segment

TIMED_OUT, GONE, HAS_LEFT, MISMATCH, NO_THREAD, NOT_YET = 1, 2, 3, 4, 5, 6

_BYTES = len(DTYPES)
_NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES] + ["bytes"]


class Kind(IntEnum):
    """The collectives."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE = 2
    REDUCE_SCATTER = 3
    ALL_GATHER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    GATHER = 7
    SCATTER = 8


def say(kind: Kind, *, size: int = 0, dtype: torch.dtype | None = None, op: Op | None = None, root: int | None = None) -> CallWords:
    """The words for a call: `size` in elements where `dtype` is given, else in bytes."""
    number = _BYTES if dtype is None else DTYPES[dtype]
    return (kind, number, 0 if op is None else op + 1, size, 0 if root is None else root + 1, *(0,) * (CALL_WORDS - 5))


def read(words: CallWords) -> str:
    """What was said, for people."""
    kind, dtype, op, size, root = words[:5]
    how = f" {Op(op - 1).name}" if op else ""
    at = f" with root {root - 1}" if root else ""
    return f"{Kind(kind).name.lower()} of {size} {_NAMES[dtype]}{how}{at}"


def explain(failed: int, culprit: int, segment: Segment, number: int, timeout_s: float) -> Failed:
    """The error for a round that ended with `failed` on account of rank `culprit`."""
    if failed == TIMED_OUT:
        return Failed(f"timed out: rank {segment.rank} waited {timeout_s:.1f} s for rank {culprit} of its group")
    if failed == GONE:
        return Failed(f"connection lost: the process of rank {culprit} of the group is gone")
    if failed == HAS_LEFT:
        who = "this rank" if culprit == segment.rank else f"rank {culprit}"
        return Failed(f"connection closed by peer: {who} has left the group")
    if failed == NO_THREAD:
        return Failed("the system gives this rank no more threads for a large call; raise its limits of memory and processes")
    said = [segment.call_of(rank, number) for rank in range(segment.size)]
    groups: dict[CallWords, list[int]] = {}
    for rank, words in enumerate(said):
        groups.setdefault(words, []).append(rank)
    if len(groups) == 1:
        return Mismatched(
            f"all ranks must expect what the others send, but what rank {culprit} sends and what is expected of it differ in size"
        )
    clauses = "; ".join(f"{', '.join(f'rank {rank}' for rank in ranks)}: {read(words)}" for words, ranks in groups.items())
    return Mismatched(f"all ranks of a group must make the same call, but they are about to make others. {clauses}")
