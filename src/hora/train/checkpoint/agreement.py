"""Have all ranks given the same to a checkpoint? Asked before anything is gathered or written, and answered on every rank alike."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hora.comm.dealt_out import as_dtensor
from hora.comm.session import session
from hora.errors import ConfigError, ReplicaMismatch
from hora.sync.replicas import bit_sum, explain
from hora.train.checkpoint.content import Entry
from hora.train.checkpoint.parts import Parts

Facts = list[Any]
"""What must be the same on all ranks of a tensor that they have parts of: entry, name, shape, type, how it is dealt out, and over how many."""


def entries_if_kept(state: Mapping[str, Any]) -> list[Entry]:
    """The trees taken apart; nothing if one cannot be kept, which is refused where it is written."""
    with suppress(ConfigError):
        return [Entry.of(name, tree) for name, tree in state.items()]
    return []


def bit_sums(entries: Sequence[Entry]) -> dict[str, int]:
    """What `require_same_replicas` compares: among several ranks, a sum over the bits of each tensor that is whole."""
    if session().world_size == 1:
        return {}
    tensors = {f"{entry.name}.{name}": tensor for entry in entries for name, tensor in entry.tensors.items()}
    sums = {name: bit_sum(tensor) for name, tensor in tensors.items() if as_dtensor(tensor) is None}
    # A device has been told to add up all of them before the host waits for the first.
    return {name: int(value) for name, value in sums.items()}


def require_same_replicas(told: Sequence[Mapping[str, int]], step: int) -> None:
    """Refuses tensors that ranks which have them have otherwise; what only some ranks hand in is those ranks' own business.

    Raises:
        ReplicaMismatch: names the first one and the ranks.
    """
    names = [name for name in told[0] if all(name in sums for sums in told)]
    rows = [[sums[name] for name in names] for sums in told]
    if any(row != rows[0] for row in rows):
        raise ReplicaMismatch(
            f"{explain(rows, names, f'step {step}', what='state to be saved')} For running statistics, which each rank has of its own, call "
            "optimizer.sync_buffers() first, and hora.sync_buffers(module) for an averaged model; otherwise go on from the last checkpoint"
        )


def facts_of(parts: Parts) -> list[Facts]:
    """What `require_same_parts` compares, as plain data."""
    return [
        [entry, name, list(part.shape), str(part.dtype), str(part.placements), part.device_mesh.size()]
        for entry, named in parts.items()
        for name, part in named.items()
    ]


def require_same_parts(told: Sequence[Sequence[Facts]]) -> None:
    """Refuses tensors in parts that cannot be put together by all ranks; `told` is what each has.

    Raises:
        ConfigError: ranks have parts of other tensors than rank 0, or a tensor is dealt out over some ranks only; names the first one.
    """
    for rank, facts in enumerate(told):
        if facts != told[0]:
            longest = max(told[0], facts, key=len)
            same = next(
                (n for n, pair in enumerate(zip(told[0], facts, strict=False)) if pair[0] != pair[1]), min(len(told[0]), len(facts))
            )
            raise ConfigError(
                "a tensor of which each rank has a part must be given to save by all ranks alike, but "
                f"{'.'.join(longest[same][:2])} is not the same on rank {rank} as on rank 0; call save with the same state everywhere"
            )
    for entry, name, *_, size in told[0]:
        if size != len(told):
            raise ConfigError(
                f"a tensor in a checkpoint must be whole or dealt out over all {len(told)} ranks, but {entry}.{name} is dealt out over {size}; give "
                "save its full_tensor()"
            )
