"""The flat buffer behind one bucket: gradients copied in, one sum over the ranks, and `.grad` as views of the result.

Behind the gradients the buffer holds one lane a parameter in which each rank writes 1 where it has a gradient: after the sum, 0 means that no
rank has one, and such a parameter keeps `grad = None` as it would in one process. Counting to the number of ranks is not needed, only telling
0 from more, which every floating-point type can.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hora.comm.flat import all_reduce_flat
from hora.comm.work import Work
from hora.errors import ConfigError
from hora.plan.buckets import BucketFacts


class GradientBucket:
    """One flat buffer for the gradients of `parameters` (all of one dtype and device), filled up to a multiple of `chunks` elements.

    Attributes:
        sums: what this rank has of the sums over the ranks, once they are made: all of them.
        lanes: for each parameter whether a rank has a gradient; by default part of the buffer.
        facts: which bucket it is, to who listens.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], chunks: int = 1, lanes: Tensor | None = None):
        self.parameters = list(parameters)
        total = sum(parameter.numel() for parameter in self.parameters)
        first = self.parameters[0]
        used = total + (len(self.parameters) if lanes is None else 0)
        self.buffer = torch.zeros(used + -used % chunks, dtype=first.dtype, device=first.device)
        self.sums = self.buffer[:total]
        self.lanes = self.buffer[total:used] if lanes is None else lanes
        self.views = self.views_of(self.buffer)
        self.facts = BucketFacts(0, 0, (), self.buffer.nbytes)
        self._missing: set[int] = set()

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """A view for each parameter of a tensor that is laid out as the buffer."""
        return _views(flat, self.parameters)

    def begin(self) -> None:
        """A step begins, in which no gradient has been found missing."""
        self._missing = set()

    def pack(self, *, empty: bool = False) -> None:
        """Copies this rank's gradients into the buffer; where there is none, zeros. `empty`: as if there were none at all."""
        if empty:
            self.buffer.zero_()
            self._missing.update(range(len(self.parameters)))
            return
        self.lanes.fill_(1)
        missing = [i for i, parameter in enumerate(self.parameters) if parameter.grad is None]
        self._missing.update(missing)
        for i in missing:
            self.views[i].zero_()
            self.lanes[i].zero_()
        pairs = [
            (view, parameter.grad)
            for parameter, view in zip(self.parameters, self.views, strict=True)
            if parameter.grad is not None and not same_memory(parameter.grad, view)
        ]
        if any(gradient.is_sparse for _, gradient in pairs):
            raise ConfigError(
                "a gradient must be dense, but a sparse one came; the parameters that get sparse ones are known by nn.Embedding(sparse=True)"
            )
        copy_all([view for view, _ in pairs], [gradient for _, gradient in pairs])

    def begin_sum(self) -> Work:
        """Begins the sum over the ranks. Collective."""
        return all_reduce_flat(self.buffer)

    def divide(self, total_weight: Tensor) -> None:
        """Turns the sum over the ranks into the mean over the global batch. `total_weight` is a scalar tensor on the bucket's device.

        Half-precision gradients are divided in float32: torch would round the divisor to their type first, and bfloat16 cannot say 257.
        """
        if self.sums.dtype in (torch.float16, torch.bfloat16):
            self.sums.copy_(self.sums.float() / total_weight)
        else:
            self.sums.div_(total_weight)

    def unpack(self) -> None:
        """Makes each `.grad` a view of the buffer, or None where no rank has a gradient."""
        absent = self.absent()
        for i, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            parameter.grad = None if i in absent else view

    def absent(self) -> set[int]:
        """The parameters of which no rank has a gradient. Looks at the lanes (on a GPU: waits for them) only when this rank lacks one itself."""
        used = self.lanes.tolist() if self._missing else []
        return {i for i in self._missing if used[i] == 0}


def copy_all(destinations: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each source into its destination: at once where torch has it (one kernel for many small tensors), else one by one."""
    together = getattr(torch, "_foreach_copy_", None)
    if together is not None and destinations:
        together(destinations, sources)
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
