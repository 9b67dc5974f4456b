"""Whether what the ranks are ready for, under one name, fits together. Horovod's words, and after them who said what."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hora.comm.records import say_ranks
from hora.hvd.negotiation.request import Kind, Reduction, Request

_SAME_SHAPE = (Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCESCATTER)
_COMBINING = (Kind.ALLREDUCE, Kind.REDUCESCATTER)

_Aspect = tuple[str, Sequence[Kind], Callable[[Request], Any], Callable[[Request, Request], str]]


def find_mismatch(requests: Mapping[int, Request]) -> str | None:
    """What differs that must not, in words, or None.

    Args:
        requests: by rank; of one name and process set.
    """
    first = next(iter(requests.values()))
    if all(request == first for request in requests.values()):
        return None
    requests = dict(sorted(requests.items()))
    first = next(iter(requests.values()))
    for what, kinds, value, say in _ASPECTS:
        if kinds and first.kind not in kinds:
            continue
        other = next((request for request in requests.values() if value(request) != value(first)), None)
        if other is not None:
            return f"{say(first, other)} {_who(what, requests, value)}"
    return None


def _who(what: str, requests: Mapping[int, Request], value: Callable[[Request], Any]) -> str:
    first = next(iter(requests.values()))
    label, told = first.name, {rank: value(requests[rank]) for rank in sorted(requests)}
    if what in ("shape", "type"):
        index = next((n for n, values in enumerate(zip(*told.values(), strict=False)) if len(set(values)) > 1), 0)
        label = first.label(index)
        parts = {rank: requests[rank].parts[index] for rank in told}
        told = {rank: part.shape if what == "shape" else part.dtype for rank, part in parts.items()}
    groups: dict[Any, list[int]] = {}
    for rank, found in told.items():
        groups.setdefault(found, []).append(rank)
    clauses = [f"{_plain(found)} on {say_ranks(ranks)}" for found, ranks in groups.items()]
    return f"Tensor {label!r}, {what}: {', '.join(clauses)}."


def _plain(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _shapes(request: Request) -> tuple[tuple[int, ...], ...]:
    return tuple(part.shape for part in request.parts)


def _rows_free(request: Request) -> tuple[tuple[int, ...], ...]:
    """Shapes without the first dimension, which may differ."""
    return tuple((len(part.shape), *part.shape[1:]) for part in request.parts)


def _say_shapes(first: Request, other: Request) -> str:
    mine, theirs = next(_differing(_shapes(first), _shapes(other)))
    verb = f"sent a tensor of shape {list(mine)}", f"sent a tensor of shape {list(theirs)}"
    return f"Mismatched {first.kind} tensor shapes: One rank {verb[0]}, but another rank {verb[1]}."


def _say_rows_free(first: Request, other: Request) -> str:
    mine, theirs = next(_differing(_rows_free(first), _rows_free(other)))
    if mine[0] != theirs[0]:
        detail = f"One rank sent a tensor of rank {mine[0]}, but another rank sent a tensor of rank {theirs[0]}."
    else:
        dim = next(n for n, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        detail = (
            f"One rank sent a tensor with dimension {dim} equal to {mine[dim]}, but another rank sent a tensor with dimension {dim} equal to "
            f"{theirs[dim]}."
        )
    return f"Mismatched {first.kind} tensor shapes: {detail}"


def _say_types(first: Request, other: Request) -> str:
    mine, theirs = next(_differing([p.dtype for p in first.parts], [p.dtype for p in other.parts]))
    return f"Mismatched data types: One rank had type {mine}, but another rank had type {theirs}."


def _differing(mine: Sequence[Any], theirs: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return ((a, b) for a, b in zip(mine, theirs, strict=True) if a != b)


_ASPECTS: tuple[_Aspect, ...] = (
    (
        "operation", (), lambda r: r.kind.value,
        lambda a, b: f"Mismatched operations: One rank did an {a.kind}, but another rank did an {b.kind}.",
    ),
    (
        "number of tensors", (), lambda r: len(r.parts),
        lambda a, b: f"Mismatched groups: One rank sent {len(a.parts)} tensors, but another rank sent {len(b.parts)} under one name.",
    ),
    (
        "tensors", (), lambda r: r.labels,
        lambda a, _: f"Mismatched groups: ranks sent different tensors under the name {a.name!r}.",
    ),
    ("type", (), lambda r: tuple(part.dtype for part in r.parts), _say_types),
    (
        "reduction", _COMBINING, lambda r: Reduction(r.op).name.capitalize(),
        lambda a, b: f"Mismatched reduction operation: One rank sent reduction op {a.op}, but another rank sent reduction op {b.op}.",
    ),
    (
        "scale", _COMBINING, lambda r: (r.prescale, r.postscale),
        lambda a, b: f"Mismatched prescale and/or postscale factors: One rank sent factors ({a.prescale}, {a.postscale}), "
        f"but another rank sent factors ({b.prescale}, {b.postscale}).",
    ),
    ("shape", _SAME_SHAPE, _shapes, _say_shapes),
    ("shape", (Kind.ALLGATHER, Kind.ALLTOALL), _rows_free, _say_rows_free),
    (
        "root rank", (Kind.BROADCAST,), lambda r: r.root,
        lambda a, b: f"Mismatched BROADCAST root ranks: One rank specified root rank {a.root}, but another rank specified root rank {b.root}.",
    ),
    (
        "device", (), lambda r: r.device,
        lambda a, b: f"Mismatched {a.kind} CPU/GPU device selection: One rank specified device {a.device}, but another rank specified device "
        f"{b.device}.",
    ),
)  # fmt: skip
