"""Do all ranks have the same model? Asked once, when its gradients are planned, and answered with the first name that differs."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from hora.comm.objects import all_gather_object
from hora.errors import CollectiveMismatch
from hora.plan.buckets import ParameterFacts


def require_same_parameters(parameters: Sequence[ParameterFacts], plan_digest: str, settings: str) -> None:
    """Compares the ranks' parameters, bucket plans and settings. Collective.

    Raises:
        CollectiveMismatch: on every rank alike; names the first parameter that differs and the ranks.
    """
    plans = all_gather_object([plan_digest, settings])
    if all(plan == plans[0] for plan in plans):
        return
    listings = all_gather_object([_entry(facts) for facts in parameters])
    raise CollectiveMismatch(_explain(listings, [settings for _, settings in plans]))


def require_same_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str], clip_norm: float | None = None) -> None:
    """Compares the ranks' optimizers: their class, which parameters are in which group, and what they clip to. Collective.

    Args:
        optimizer: this rank's.
        names: of the parameters by their `id`; frozen ones need none.
        clip_norm: this rank's.

    Raises:
        CollectiveMismatch: on every rank alike; names what differs and the ranks.
    """
    groups = [[names.get(id(parameter), "frozen") for parameter in group["params"]] for group in optimizer.param_groups]
    clips = None if clip_norm is None else float(clip_norm)
    kinds = all_gather_object([type(optimizer).__name__, zlib.crc32(json.dumps(groups).encode()), clips])
    if all(kind == kinds[0] for kind in kinds):
        return
    for rank, (*_, theirs) in enumerate(kinds):
        if theirs != kinds[0][-1]:
            raise CollectiveMismatch(
                "all ranks must pass the same arguments to DistributedOptimizer, but clip_norm is "
                f"{kinds[0][-1]} on rank 0 and {theirs} on rank {rank}"
            )
    rule = "all ranks must make the same optimizer, with the same parameters in the same order and groups"
    for rank, (name, listing) in enumerate(zip([kind[0] for kind in kinds], all_gather_object(groups), strict=True)):
        if name != kinds[0][0]:
            raise CollectiveMismatch(f"{rule}, but it is {kinds[0][0]} on rank 0 and {name} on rank {rank}")
        if rank == 0:
            first = listing
        elif listing != first:
            index = next(
                (i for i, pair in enumerate(zip(first, listing, strict=False)) if pair[0] != pair[1]), min(len(first), len(listing))
            )
            ours, theirs = (_say_group(groups, index) for groups in (first, listing))
            raise CollectiveMismatch(f"{rule}, but group {index} is {ours} on rank 0 and {theirs} on rank {rank}")


def require_same_arguments(what: str, **arguments: str | float | bool | None) -> None:
    """Compares the arguments that ranks have made `what` with. Collective.

    Raises:
        CollectiveMismatch: on every rank alike; names the first argument that differs and the ranks.
    """
    told = all_gather_object(arguments)
    for rank, theirs in enumerate(told):
        for name, value in told[0].items():
            if theirs[name] != value:
                raise CollectiveMismatch(
                    f"all ranks must make {what} with the same arguments, but {name} is {value!r} on rank 0 and {theirs[name]!r} on rank {rank}"
                )


def _say_group(groups: Sequence[Sequence[str]], index: int) -> str:
    if index >= len(groups):
        return "absent"
    names = groups[index]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _entry(facts: ParameterFacts) -> dict[str, Any]:
    return {**asdict(facts), "shape": list(facts.shape)}


def _explain(listings: Sequence[Sequence[dict[str, Any]]], settings: Sequence[str]) -> str:
    rule = "all ranks must build the same model and pass the same arguments to DistributedOptimizer"
    for rank, listing in enumerate(listings):
        for index in range(max(len(listing), len(listings[0]))):
            ours = listings[0][index] if index < len(listings[0]) else None
            theirs = listing[index] if index < len(listing) else None
            if ours != theirs:
                return f"{rule}, but trainable parameter {index} is {_say(ours)} on rank 0 and {_say(theirs)} on rank {rank}"
    for rank, text in enumerate(settings):
        if text != settings[0]:
            return f"{rule}, but rank 0 has {settings[0]} and rank {rank} {text}"
    return f"{rule}, but the ranks have made a different number of models until now"


def _say(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "absent"
    return f"{entry['name']!r} {entry['shape']} {entry['kind']}{' sparse' if entry['sparse'] else ''}"
