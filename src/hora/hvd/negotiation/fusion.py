"""What travels together. Pure."""

from collections.abc import Hashable, Sequence

from hora.hvd.negotiation.request import Kind, Reduction
from hora.hvd.negotiation.table import Ready


def plan_fusion(ready: Sequence[Ready], threshold_bytes: int) -> list[list[Ready]]:
    """Groups what is ready into batches that one collective for each type can carry, of at most `threshold_bytes` unless one alone is larger.

    Batches come in the order of their first members; what can go into one looks past what cannot.
    """
    batches: list[list[Ready]] = []
    open_batches: dict[Hashable, tuple[list[Ready], int]] = {}
    for one in ready:
        key, size_bytes = _fusion_key(one), 0
        if key is None:
            batches.append([one])
            continue
        size_bytes = one.request.size_bytes
        batch, filled = open_batches.get(key, ([], 0))
        if not batch or filled + size_bytes > threshold_bytes:
            batch, filled = [], 0
            batches.append(batch)
        batch.append(one)
        open_batches[key] = (batch, filled + size_bytes)
    return batches


def _fusion_key(ready: Ready) -> Hashable | None:
    """What must be the same within a batch; None for what travels alone."""
    request = ready.request
    if ready.error is not None:
        return None
    if request.kind is Kind.ALLREDUCE and request.op != Reduction.ADASUM:
        return (request.kind, request.set_id, request.device, request.op, request.prescale, request.postscale, ready.absent)
    if request.kind is Kind.BROADCAST:
        return (request.kind, request.set_id, request.device, request.root)
    return None
