"""The flat buffer behind one bucket: gradients copied in, one sum over the ranks, and `.grad` as views of the result.

Behind the gradients the buffer holds one lane a parameter in which each rank writes 1 where it has a gradient: after the sum, 0 means that no
rank has one, and such a parameter keeps `grad = None` as it would in one process. Counting to the number of ranks is not needed, only telling
0 from more, which every floating-point type can. Where ranks look at their gradients on the way into the buffer, a lane is infinite if one of
them has found something to look into.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hora.comm.dividing import divide_and_look
from hora.comm.flat import all_reduce_flat
from hora.comm.packing import Packing, make_packing
from hora.comm.torch_private import copy_many, divide_many, flatten_many, unflatten_many
from hora.comm.work import Work
from hora.errors import ConfigError
from hora.plan.buckets import BucketFacts

_SURELY_SUMMED = 1e18
"""A gradient whose norm, or largest magnitude, is less can be summed over any number of ranks in float32."""

_HALF = (torch.float16, torch.bfloat16)

_SMALL_BYTES = 2**14
"""Gradients up to this size are divided together: each takes longer to begin with than to divide."""
_TOGETHER_BYTES = 2**20
"""When so many of them have come, so that they and the two copies of them that are made are in the processor's cache."""

_MANY = 2**22
"""Numbers from which on one kernel for all takes half as long as that of `torch.div`, with the same bits; of fewer, twice as long (H200)."""

_FINE = torch.zeros((), device="cpu")
"""The mark of a gradient that is finite."""


class GradientBucket:
    """One flat buffer for the gradients of `parameters` (all of one dtype and device), filled up to a multiple of `chunks` elements.

    Attributes:
        sums: what this rank has of the sums over the ranks, once they are made: all of them.
        lanes: for each parameter whether a rank has a gradient; by default part of the buffer.
        facts: which bucket it is, to who listens.
        is_divided: whether the sums are, or will be, the means over the global batch already.
        travels_narrow: whether the sums are made of rounded values, which may be too large for the type they travel in.
        keeps_marks: whether gradients that are divided on their way are looked at.
        own_marks: of those that were looked at, by number of the parameter, what is finite only if this rank's own gradient was.
        largest: of those that were looked at on a GPU, each one's largest magnitude, as far as one kernel copies and looks at them.
    """

    dealt_out = False
    """Whether each rank has the sums of one chunk alone."""

    def __init__(self, parameters: Sequence[nn.Parameter], chunks: int = 1, lanes: Tensor | None = None):
        self.parameters = list(parameters)
        total = sum(parameter.numel() for parameter in self.parameters)
        first = self.parameters[0]
        used = total + (len(self.parameters) if lanes is None else 0)
        if lanes is not None:
            self.lanes = lanes
        self.lie_in(torch.zeros(used + -used % chunks, dtype=first.dtype, device=first.device), own_lanes=lanes is None)
        self._ones = torch.ones_like(self.lanes)
        self.facts = BucketFacts(0, 0, (), self.buffer.nbytes)
        self._missing: set[int] = set()
        self._taken: set[int] = set()
        self._waiting: dict[int, None] = {}
        self._waiting_bytes = 0
        self._suspects: set[int] = set()
        self.is_divided = False
        self.own_marks: dict[int, Tensor] = {}
        self.largest: Tensor | None = None
        self.keeps_marks = True
        self.travels_narrow = False

    def lie_in(self, buffer: Tensor, *, own_lanes: bool = True) -> None:
        """From now on `buffer`, of zeros and as long as the one before, is the buffer."""
        total = sum(parameter.numel() for parameter in self.parameters)
        self.buffer, self.sums = buffer, buffer[:total]
        if own_lanes:
            self.lanes = buffer[total : total + len(self.parameters)]
        self.views = self.views_of(buffer)
        self._packing: Packing | None = None
        self._marks_copies = False

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """A view for each parameter of a tensor that is laid out as the buffer."""
        return _views(flat, self.parameters)

    def begin(self) -> None:
        """A step begins, in which no gradient has been found missing."""
        self._missing, self._taken, self._suspects, self.is_divided = set(), set(), set(), False
        self._waiting, self._waiting_bytes = {}, 0

    @contextmanager
    def marking(self) -> Iterator[None]:
        """Inside the `with` block gradients that are copied on a GPU are looked at, where one kernel can do both; what the last ones were like is
        forgotten behind it. Not to be entered while a graph is captured.
        """
        self._marks_copies = True
        try:
            if self._packing is None:
                self._packing = make_packing(self.buffer, self.views)
            yield
        finally:
            self._marks_copies, self.own_marks, self.largest = False, {}, None

    def take(self, member: int, divisor: Tensor) -> None:
        """Puts this rank's gradient of one parameter into the buffer, divided, while it is in the processor's cache, and gives its memory back;
        adds it there if one of the parameter has been taken already. Does nothing where there is none; a small one waits for others. To be called
        under `torch.no_grad()`, which for each parameter would take longer than the rest.
        """
        parameter = self.parameters[member]
        if parameter.grad is None:
            return
        if parameter.nbytes > _SMALL_BYTES or member in self._taken:
            self._put(member, parameter.grad, divisor, add=member in self._taken)
            parameter.grad = None
            self._taken.add(member)
        elif member not in self._waiting:
            self._waiting[member] = None
            self._waiting_bytes += parameter.nbytes
            if self._waiting_bytes >= _TOGETHER_BYTES:
                self._take_waiting(divisor)

    def _take_waiting(self, divisor: Tensor) -> None:
        """Takes the small gradients that wait."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        gradients = {member: gradient for member in waiting if (gradient := self.parameters[member].grad) is not None}
        if gradients and not self._put_together(gradients, divisor):
            for member, gradient in gradients.items():
                self._put(member, gradient, divisor)
        for member in gradients:
            self.parameters[member].grad = None
        self._taken.update(gradients)

    @torch.no_grad()
    def pack(self, divisor: Tensor | None = None, *, empty: bool = False) -> None:
        """Puts this rank's gradients into the buffer, those that have not been taken; where there is none, zeros. `empty`: as if there were none
        at all.

        `divisor`: what the sum will be divided by, a scalar, if that is known. They are divided on their way then, which costs nothing.
        """
        self.is_divided = divisor is not None
        if empty:
            self.buffer.zero_()
            self._missing.update(range(len(self.parameters)))
            return
        copied: dict[int, Tensor] = {}
        absent: list[int] = []  # now; in exact mode a gradient may have come before, or come yet, of another logical rank
        for i, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            gradient = parameter.grad
            if gradient is None:
                if i not in self._taken:
                    absent.append(i)
                    view.zero_()
            elif divisor is not None:
                self.take(i, divisor)
            elif not same_memory(gradient, view):
                _require_dense(gradient)
                copied[i] = gradient
        if divisor is not None:
            self._take_waiting(divisor)
        self._copy(copied)
        self._missing.update(absent)
        for i in absent:
            self.lanes[i].zero_()
        for i in self._suspects:
            self.lanes[i].fill_(math.inf)

    def _copy(self, gradients: dict[int, Tensor]) -> None:
        """Copies gradients to their places, and ones into all lanes; looks at all that stands in the buffer then, if gradients are marked."""
        packing = self._packing if self._marks_copies else None
        packed = {} if packing is None else {i: gradient for i, gradient in gradients.items() if packing.takes(i, gradient)}
        pairs = [(self.views[i], gradient) for i, gradient in gradients.items() if i not in packed]
        if self.lanes.dtype is self.buffer.dtype:
            pairs.append((self.lanes, self._ones))  # one kernel fewer
        else:
            self.lanes.fill_(1)
        copy_all([view for view, _ in pairs], [gradient for _, gradient in pairs])
        if packing is not None:
            self.largest = packing.pack(packed)
            self.own_marks = dict(zip(packing.members, self.largest.unbind(), strict=True))

    def _put(self, member: int, gradient: Tensor, divisor: Tensor, *, add: bool = False) -> None:
        _require_dense(gradient)
        view = self.views[member]
        largest = divide_and_look(gradient, float(divisor), view) if self.keeps_marks and not add else None
        if self.keeps_marks:
            size = _norm(gradient) if largest is None else largest
            fine = size < _SURELY_SUMMED * min(1.0, float(divisor))
            mark = _FINE if fine else extremes(gradient)
            self.own_marks[member] = mark + self.own_marks[member] if add else mark
            if not fine:
                self._suspects.add(member)
        if largest is not None:
            return
        if add:
            view.add_(_divide(gradient, divisor, torch.empty_like(view)))
        else:
            _divide(gradient, divisor, view)

    def _put_together(self, gradients: dict[int, Tensor], divisor: Tensor) -> bool:
        """As `_put` of each, which is the oracle, in a few calls for all. False, with nothing put, if one is to be looked into, or torch cannot."""
        if flatten_many is None or unflatten_many is None or self.buffer.is_complex() or any(each.is_sparse for each in gradients.values()):
            return False
        values: Tensor = flatten_many(list(gradients.values()))
        divided = torch.empty_like(values)
        largest = divide_and_look(values, float(divisor), divided) if self.keeps_marks else None
        if self.keeps_marks:
            size = _norm(values) if largest is None else largest
            if not size < _SURELY_SUMMED * min(1.0, float(divisor)):
                return False
            self.own_marks.update(dict.fromkeys(gradients, _FINE))
        if largest is None:
            _divide(values, divisor, divided)
        views = [self.views[member] for member in gradients]
        copy_all(views, list(unflatten_many(divided, views)))
        return True

    def is_surely_finite(self) -> bool:
        """Whether the sums are known to be finite without a look at each, because all ranks have looked at their gradients; on all ranks alike."""
        looked = self.is_divided and self.keeps_marks and not self.travels_narrow and not _is_half(self.sums)
        return looked and bool(self.lanes.sum().isfinite())

    def begin_sum(self, *, waits: bool = False) -> Work:
        """Begins the sum over the ranks. Collective. `waits`: the caller waits for it now."""
        return all_reduce_flat(self.buffer, waits=waits)

    def unpack(self) -> None:
        """Makes each `.grad` a view of the buffer, or None where no rank has a gradient."""
        absent = self.absent()
        for i, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            parameter.grad = None if i in absent else view

    def put_aside(self) -> None:
        """Takes away what `unpack` has given."""
        for parameter in self.parameters:
            parameter.grad = None

    def absent(self) -> set[int]:
        """The parameters of which no rank has a gradient. Looks at the lanes (on a GPU: waits for them) only when this rank lacks one itself."""
        used = self.lanes.tolist() if self._missing else []
        return {i for i in self._missing if used[i] == 0}


def divide_all(buckets: Iterable[GradientBucket], total_weight: Tensor) -> None:
    """Turns sums over the ranks into means over the global batch, where they are not that already. `total_weight` is a scalar, there or on the CPU.

    In half precision by way of float32: torch would round the divisor to their type first, and bfloat16 cannot say 257.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for bucket in buckets:
        if not bucket.is_divided:
            by_dtype.setdefault(bucket.sums.dtype, []).append(bucket.sums)
    for dtype, sums in by_dtype.items():
        if _divides_at_once(dtype) and sums[0].is_cuda and (len(sums) > 1 or sums[0].numel() >= _MANY):
            divide_many(sums, total_weight.to(dtype))
        else:
            for values in sums:
                _divide(values, total_weight, values)


def _divides_at_once(dtype: torch.dtype) -> bool:
    """Whether one kernel for many tensors has the bits of a division of each: complex numbers it would divide by complex ones."""
    return divide_many is not None and dtype not in _HALF and not dtype.is_complex


def extremes(gradient: Tensor) -> Tensor:
    """Zero, or no number if an element is not finite."""
    low, high = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).aminmax()
    return low * 0 + high * 0


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float32 if _is_half(gradient) else None))


def _is_half(values: Tensor) -> bool:
    return values.dtype in _HALF


def _require_dense(gradient: Tensor) -> None:
    if gradient.is_sparse:
        raise ConfigError(
            "a gradient must be dense, but a sparse one came; the parameters that get sparse ones are known by nn.Embedding(sparse=True)"
        )


def _divide(values: Tensor, divisor: Tensor, out: Tensor) -> Tensor:
    """Writes into `out` and returns it."""
    if _is_half(values):
        return out.copy_(values.float() / divisor)
    return torch.div(values, divisor, out=out)


def copy_all(destinations: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each source into its destination: at once where torch has it (one kernel for many small tensors), else one by one."""
    if copy_many is not None and destinations:
        copy_many(destinations, sources)
        return
    for destination, source in zip(destinations, sources, strict=True):
        destination.copy_(source)


def same_memory(gradient: Tensor, view: Tensor) -> bool:
    """Whether `gradient` already lives in the buffer where `view` points, so that nothing need be copied."""
    return gradient.data_ptr() == view.data_ptr() and gradient.stride() == view.stride()


def _views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Cuts `flat` into one view a parameter, with the parameter's own strides where these are dense (channels_last stays channels_last)."""
    views, offset = [], 0
    for parameter in parameters:
        piece = flat[offset : offset + parameter.numel()]
        dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
        views.append(piece.as_strided(parameter.size(), parameter.stride()) if dense else piece.view(parameter.size()))
        offset += parameter.numel()
    return views
