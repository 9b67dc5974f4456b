"""What the ranks have agreed on, done with tensors: the collectives of `hora.comm`, on a group that only the engine uses."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from hora.comm import collectives
from hora.comm.dtypes import DTYPES
from hora.comm.subgroups import Subgroup
from hora.comm.torch_private import copy_many, flatten_many, unflatten_many
from hora.hvd.engine import adasum
from hora.hvd.engine.entry import Entry
from hora.hvd.engine.scaling import combinable, divide, reduce_op_for, scale
from hora.hvd.engine.timeline import Timeline
from hora.hvd.negotiation.request import Kind, Reduction, Request

_Act = Callable[[Tensor, Request, Subgroup], Tensor]

_KEPT_BYTES = 16 * 2**20
_SMALL_BYTES = 2**21
"""Up to what size new memory costs less than a call of torch for each tensor."""


class Executor:
    """Carries out batches, one after the other.

    Args:
        device: where the groups move bytes; tensors on other devices are brought there and back.
        backend: what moves them.
        timeline: is told what is done when.
    """

    def __init__(self, device: torch.device, backend: str, timeline: Timeline) -> None:
        self._device = device
        self._backend = backend.upper()
        self._timeline = timeline
        self._buffers: dict[torch.dtype, Tensor] = {}

    def run(self, entries: Sequence[Entry], same_rows: bool, group: Subgroup) -> None:
        """Does what `entries`, which differ in their tensors alone, ask for.

        Collective: all ranks of `group` call it with the same operations.
        """
        kind = entries[0].request.kind
        if kind in (Kind.ALLREDUCE, Kind.BROADCAST):
            # Results go into tensors of the caller's, which may have been made in inference mode and are written in that alone.
            with torch.inference_mode():
                self._keep_shape(entries, group)
        elif kind is not Kind.BARRIER:
            act = {Kind.ALLGATHER: self._gather, Kind.ALLTOALL: self._exchange, Kind.REDUCESCATTER: self._scatter}[kind]
            act(entries[0], same_rows, group)

    # What keeps the shape -----------------------------------------------------------------------------------------------------------------

    def _keep_shape(self, entries: Sequence[Entry], group: Subgroup) -> None:
        request = entries[0].request
        if request.kind is Kind.BROADCAST:
            self._together(entries, group, self._spread)
        elif request.op == Reduction.ADASUM:
            self._adasum(entries[0], group)
        else:
            self._together(entries, group, self._combine)

    def _together(self, entries: Sequence[Entry], group: Subgroup, act: _Act) -> None:
        """Has `act` done once for each type, on one flat tensor that holds all of that type."""
        pairs: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for entry in entries:
            for given, output in zip(entry.tensors, entry.outputs or entry.tensors, strict=True):
                pairs.setdefault(given.dtype, []).append((given, output))
        for dtype, some in pairs.items():
            sent, outputs = [one for one, _ in some], [output for _, output in some]
            if len(some) == 1 and self._are_here(outputs):
                self._alone(sent[0], outputs[0], entries, group, act)
                continue
            with self._timeline.activity(entries, "MEMCPY_IN_FUSION_BUFFER"):
                packed = self._pack(sent, dtype)
            with self._timeline.activity(entries, self._name_of(entries)):
                result = act(packed, entries[0].request, group)
            with self._timeline.activity(entries, "MEMCPY_OUT_FUSION_BUFFER"):
                _copy(outputs, _cut(result, outputs))
        for entry in entries:
            entry.result = entry.outputs or entry.tensors

    def _alone(self, given: Tensor, output: Tensor, entries: Sequence[Entry], group: Subgroup, act: _Act) -> None:
        """Without a copy, where the result goes into what was given."""
        flat = _flat(output)
        if output is not given:
            flat.copy_(_flat(given))
        with self._timeline.activity(entries, self._name_of(entries)):
            result = act(flat, entries[0].request, group)
        if result is not flat:
            flat.copy_(result)

    def _name_of(self, entries: Sequence[Entry]) -> str:
        """`SHM_ALLREDUCE`, as Horovod calls it in timelines."""
        return f"{self._backend}_{entries[0].request.kind}"

    def _pack(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        numel = sum(tensor.numel() for tensor in tensors)
        is_here = self._are_here(tensors)
        if is_here and numel * dtype.itemsize <= _SMALL_BYTES and flatten_many is not None:
            return cast(Tensor, flatten_many(list(tensors)))
        flats = [_flat(tensor) for tensor in tensors]
        if not is_here:
            flats = [flat.to(self._device) for flat in flats]
        if numel * dtype.itemsize > _KEPT_BYTES:
            return torch.cat(flats)
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[dtype] = torch.empty(numel, dtype=dtype, device=self._device)
        return torch.cat(flats, out=buffer[:numel])

    def _are_here(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all are on the device where bytes are moved; a model may be spread over several GPUs."""
        if self._device.type == "cpu":  # all of a batch are of one type, and there is one CPU
            return tensors[0].device.type == "cpu"
        return all(tensor.device == self._device for tensor in tensors)

    def _combine(self, flat: Tensor, request: Request, group: Subgroup) -> Tensor:
        scale(flat, request.prescale)
        wide = combinable(flat)
        collectives.all_reduce(wide, reduce_op_for(request.op, wide.dtype), name=request.name, group=group)
        if request.op == Reduction.AVERAGE:
            divide(wide, group.world_size, request.postscale)
        else:
            scale(wide, request.postscale)
        return wide.to(flat.dtype)

    def _spread(self, flat: Tensor, request: Request, group: Subgroup) -> Tensor:
        return collectives.broadcast(flat, group.ranks.index(request.root), name=request.name, group=group)

    # What does not ------------------------------------------------------------------------------------------------------------------------

    def _gather(self, entry: Entry, same_rows: bool, group: Subgroup) -> None:
        entry.result = [
            torch.cat(collectives.all_gather(tensor.to(self._device), same_shape=same_rows, name=entry.request.name, group=group)).to(
                tensor.device
            )
            for tensor in entry.tensors
        ]

    def _exchange(self, entry: Entry, _: bool, group: Subgroup) -> None:
        tensor = entry.tensors[0]
        splits = entry.request.splits or (tensor.size(0) // group.world_size,) * group.world_size
        sent = list(tensor.to(self._device).split(list(splits)))
        received = collectives.all_to_all(sent, name=entry.request.name, group=group)
        rows = torch.tensor([part.size(0) for part in received], dtype=torch.int32, device="cpu")
        entry.result = [torch.cat(received).to(tensor.device), rows]

    def _scatter(self, entry: Entry, _: bool, group: Subgroup) -> None:
        entry.result = [self._scatter_one(tensor, entry.request, group) for tensor in entry.tensors]

    def _scatter_one(self, tensor: Tensor, request: Request, group: Subgroup) -> Tensor:
        given = tensor.to(self._device)
        if request.prescale != 1.0:
            given = given.clone() if given is tensor else given
            scale(given, request.prescale)
        wide = combinable(given)
        part = collectives.reduce_scatter(wide, reduce_op_for(request.op, wide.dtype), name=request.name, group=group)
        if request.op == Reduction.AVERAGE:
            divide(part, group.world_size, request.postscale)
        else:
            scale(part, request.postscale)
        return part.to(dtype=tensor.dtype, device=tensor.device)

    def _adasum(self, entry: Entry, group: Subgroup) -> None:
        outputs = entry.outputs or entry.tensors
        for tensor, output in zip(entry.tensors, outputs, strict=True):
            given = tensor.to(self._device)
            if entry.request.prescale != 1.0:
                given = given * entry.request.prescale
            combined = adasum.combine(collectives.all_gather(given, same_shape=True, name=entry.request.name, group=group))
            scale(combined, entry.request.postscale)
            output.copy_(combined)
        entry.result = list(outputs)


def absent_entry(request: Request, device: torch.device) -> Entry:
    """What a rank that has joined takes part with: zeros."""
    zeros = [torch.zeros(part.shape, dtype=DTYPES[part.dtype], device=device) for part in request.parts]
    return Entry(request, zeros, zeros)


def _flat(tensor: Tensor) -> Tensor:
    """`tensor` in one dimension; torch is asked only where it has not one, for a call of torch lets another thread run."""
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _cut(flat: Tensor, shapes: Sequence[Tensor]) -> Sequence[Tensor]:
    """The parts of `flat`, shaped as `shapes`."""
    if unflatten_many is not None:
        return cast("Sequence[Tensor]", unflatten_many(flat, list(shapes)))
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape.shape) for part, shape in zip(parts, shapes, strict=True)]


def _copy(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if copy_many is not None and all(one.device == other.device for one, other in zip(to, values, strict=True)):
        copy_many(to, values)
        return
    for one, other in zip(to, values, strict=True):
        one.copy_(other)
