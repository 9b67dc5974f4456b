"""Are the parameters of all ranks the same? Compared by a sum over the bits of each, which any flipped one changes."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hora import log
from hora.comm.collectives import all_gather
from hora.comm.records import say_ranks
from hora.comm.session import session
from hora.errors import ReplicaMismatch
from hora.sync.parameters import broadcast_optimizer_state, broadcast_parameters

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def compare_replicas(parameters: Mapping[str, Tensor], when: str, repaired: torch.optim.Optimizer | None = None) -> None:
    """Compares `parameters` over the ranks. Collective; makes the host wait for the device.

    Args:
        parameters: by name, the same names on all ranks.
        when: for the message: after what they were found to differ.
        repaired: the optimizer whose state ranks that differ are given, with the parameters, by the majority of ranks. None: do not repair.

    Raises:
        ReplicaMismatch: they differ, and are not to be repaired, or there is no majority; on every rank alike.
    """
    if session().world_size == 1 or not parameters:
        return
    sums = torch.stack([bit_sum(tensor) for tensor in parameters.values()])
    rows = [tuple(row.tolist()) for row in all_gather(sums, same_shape=True)]
    if all(row == rows[0] for row in rows):
        return
    sound = majority(rows)
    text = explain(rows, list(parameters), when)
    if sound is None or repaired is None:
        raise ReplicaMismatch(
            f"{text} Memory that fails does this, and code that changes parameters on some ranks only; go on from the last checkpoint, or let the "
            "majority repair it: Checks(repair=True)"
        )
    log.get_logger().warning("%s They now have those of rank %d.", text, sound)
    broadcast_parameters(dict(parameters), sound)
    broadcast_optimizer_state(repaired, sound)


def bit_sum(tensor: Tensor) -> Tensor:
    """The sum of the tensor's bits, word by word, as an int64 scalar on its device (2^64 wraps around).

    What is added depends on shape and type alone, not on how the tensor lies in memory.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = (torch.view_as_real(plain) if plain.is_complex() else plain).contiguous().reshape(-1)
    # Sums of 8 bytes at a time take a tenth of the time on CPUs; of shorter words they are converted one by one.
    in_word = 8 // flat.element_size()
    if flat.storage_offset() % in_word:
        flat = flat.clone()
    whole = flat.numel() - flat.numel() % in_word
    rest = flat[whole:].view(_WORDS[flat.element_size()]).sum(dtype=torch.int64)
    return flat[:whole].view(torch.int64).sum() + rest


def majority(rows: Sequence[object]) -> int | None:
    """The first rank of those that more than half of all agree with."""
    return next((rank for rank, row in enumerate(rows) if 2 * rows.count(row) > len(rows)), None)


def explain(rows: Sequence[Sequence[int]], names: Sequence[str], when: str, *, what: str = "parameters") -> str:
    """Who differs from whom, and in what: `rows` are the ranks' sums of the tensors `names`."""
    sound = majority(rows)
    reference = rows[0 if sound is None else sound]
    odd = [rank for rank, row in enumerate(rows) if row != reference]
    others = [rank for rank, row in enumerate(rows) if row == reference]
    differing = [name for index, name in enumerate(names) if any(rows[rank][index] != reference[index] for rank in odd)]
    verb = "differs" if len(odd) == 1 else "differ"
    return (
        f"all ranks must have the same {what}, but after {when} {say_ranks(odd)} {verb} from {say_ranks(others)}, first in "
        f"{differing[0]!r} ({len(differing)} of {len(names)} tensors)."
    )
