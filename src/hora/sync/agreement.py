"""Do all ranks have the same model? Asked once, when its gradients are planned, and answered with the first name that differs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

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
