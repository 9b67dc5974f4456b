"""Which gradients travel under one name. Pure, and the same on all ranks, which name the same parameters in one order."""

from collections.abc import Sequence

from torch import Tensor

_BUCKET_BYTES = 4 * 2**20


def plan_buckets(parameters: Sequence[Tensor], groups: int | Sequence[Sequence[Tensor]] | None) -> list[list[int]]:
    """Cuts `parameters` into buckets of indices.

    Args:
        parameters: in an order that is the same on all ranks.
        groups: how many buckets, of neighbours; or the tensors of some buckets, of which those count that are in `parameters`. What is in none, by
            itself in buckets of 4 MiB of one type, beginning with the last parameters, whose gradients come first.
    """
    if isinstance(groups, int) and groups > 0:
        share, rest = divmod(len(parameters), groups)
        ends = [share * (n + 1) + min(n + 1, rest) for n in range(groups)]
        cut = [list(range(begin, end)) for begin, end in zip([0, *ends], ends, strict=False)]
        return [bucket for bucket in cut if bucket]
    places = {id(parameter): index for index, parameter in enumerate(parameters)}
    named = groups if groups and not isinstance(groups, int) else []
    asked = [[places[id(tensor)] for tensor in group if id(tensor) in places] for group in named]
    taken = {index for bucket in asked for index in bucket}
    return [*filter(None, asked), *_by_size(parameters, taken)]


def _by_size(parameters: Sequence[Tensor], taken: set[int]) -> list[list[int]]:
    buckets: list[list[int]] = []
    filled: dict[object, tuple[list[int], int]] = {}
    for index in reversed(range(len(parameters))):
        if index in taken:
            continue
        parameter = parameters[index]
        kind = (parameter.dtype, parameter.device)
        bucket, size_bytes = filled.get(kind, ([], 0))
        if not bucket or size_bytes + parameter.nbytes > _BUCKET_BYTES:
            bucket, size_bytes = [], 0
            buckets.append(bucket)
        bucket.append(index)
        filled[kind] = (bucket, size_bytes + parameter.nbytes)
    return buckets
