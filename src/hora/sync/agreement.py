"""Do all ranks have the same model? Asked once, when its gradients are planned, and answered with the first name that differs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hora.comm.objects import all_gather_object
from hora.errors import CollectiveMismatch
from hora.plan.buckets import ParameterFacts


def require_same_parameters(parameters: Sequence[ParameterFacts], plan_digest: str) -> None:
    """Compares the ranks' parameters and bucket plans. Collective.

    Raises:
        CollectiveMismatch: on every rank alike; names the first parameter that differs and the ranks.
    """
    digests = all_gather_object(plan_digest)
    if len(set(digests)) == 1:
        return
    listings = all_gather_object([_entry(facts) for facts in parameters])
    raise CollectiveMismatch(_explain(listings))


def _entry(facts: ParameterFacts) -> dict[str, Any]:
    return {**asdict(facts), "shape": list(facts.shape)}


def _explain(listings: Sequence[Sequence[dict[str, Any]]]) -> str:
    rule = "all ranks must build the same model and pass the same strategy arguments"
    for rank, listing in enumerate(listings):
        for index in range(max(len(listing), len(listings[0]))):
            ours = listings[0][index] if index < len(listings[0]) else None
            theirs = listing[index] if index < len(listing) else None
            if ours != theirs:
                return f"{rule}, but trainable parameter {index} is {_say(ours)} on rank 0 and {_say(theirs)} on rank {rank}"
    return f"{rule}, but the gradient buckets differ: bucket_cap_bytes is not the same on all ranks"


def _say(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "absent"
    return f"{entry['name']!r} {entry['shape']} {entry['kind']}{' sparse' if entry['sparse'] else ''}"
