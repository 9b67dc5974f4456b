"""The gradients of one optimizer, combined over the ranks while backward goes on.

A bucket of parameters is given to the engine when the last of its gradients has come. When a backward has brought all of them, it ends only when
they are combined: what the user does with `.grad` next (clipping, a GradScaler) sees the same numbers on every rank. Where another rank lacks
gradients, and waits for this one in another operation before its step, backward ends without, with a warning.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hora import log, pulse
from hora.comm.dtypes import dtype_name
from hora.hvd import asynchronous, state
from hora.hvd.compression import Compressor
from hora.hvd.engine.entry import Entry
from hora.hvd.exceptions import brief
from hora.hvd.handles import synchronize
from hora.hvd.negotiation.request import Kind, Part, Request
from hora.hvd.process_sets import ProcessSet
from hora.sync.autograd import at_end_of_backward

TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase backward_passes_per_step to accumulate "
    "gradients locally."
)
_EARLY = (
    "backward() returns before all gradients are combined: a rank that has none for some of %r waits for this one in another operation. step() "
    "combines them; call optimizer.synchronize() before you clip or unscale them"
)


@dataclass(frozen=True)
class Combining:
    """How gradients are combined.

    Attributes:
        op: Average or Sum.
        compression: what they travel as.
        prescale: factor before.
        postscale: factor of the result.
        sparse_as_dense: whether sparse gradients travel as dense ones.
        process_set: over which ranks.
    """

    op: int
    compression: type[Compressor]
    prescale: float
    postscale: float
    sparse_as_dense: bool
    process_set: ProcessSet


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients travel under one name.

    Attributes:
        sparse: those whose gradients travel as indices and values, and how many of their dimensions are sparse.
        made_dense: the same of those whose gradients are sparse, and travel as dense ones.
    """

    name: str
    members: list[nn.Parameter]
    labels: tuple[str, ...]
    missing: int = 0
    sparse: dict[nn.Parameter, int] = field(default_factory=dict)
    made_dense: dict[nn.Parameter, int] = field(default_factory=dict)
    given: bool = False
    entry: Entry | None = None
    sent: list[tuple[Tensor, Any]] = field(default_factory=list)
    waiting: list[tuple[nn.Parameter, asynchronous.SparseSum]] = field(default_factory=list)
    request: Request | None = None

    @property
    def dense(self) -> list[nn.Parameter]:
        """The parameters whose gradients travel as they are."""
        return [parameter for parameter in self.members if parameter not in self.sparse]


class GradientExchange:
    """Combines the gradients of `parameters`.

    Args:
        parameters: those that are trained.
        labels: what they are called.
        buckets: indices of those that travel together.
        combining: how.
        passes: backward passes of one step, whose gradients add up.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], labels: Sequence[str], buckets: Sequence[Sequence[int]], combining: Combining, passes: int
    ) -> None:
        self._combining = combining
        self._passes = dict.fromkeys(parameters, passes)
        self._left = dict(self._passes)
        self._buckets = [
            _Bucket(_bucket_name([labels[n] for n in bucket]), [parameters[n] for n in bucket], tuple(labels[n] for n in bucket))
            for bucket in buckets
        ]
        self._home = {parameter: bucket for bucket in self._buckets for parameter in bucket.members}
        self._awaits_end = self._has_warned = False
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._on_gradient) for parameter in parameters]
        self.reset()

    def close(self) -> None:
        """Lets go of the parameters."""
        for hook in self._hooks:
            hook.remove()

    def set_passes(self, passes: int) -> None:
        """Sets how many backward passes a step has, from the next one on."""
        self._passes = dict.fromkeys(self._passes, passes)
        self.reset()

    @property
    def has_begun(self) -> bool:
        """Whether gradients of this step were sent, and no step has used them."""
        return any(bucket.given for bucket in self._buckets)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients have come since this step began."""
        return self._left != self._passes

    def reset(self) -> None:
        """A new step begins."""
        self._awaits_end = False
        self._left = dict(self._passes)
        for bucket in self._buckets:
            bucket.missing, bucket.given, bucket.entry, bucket.sent = len(bucket.members), False, None, []
            bucket.waiting = []

    @brief
    def finish(self) -> None:
        """Sends what has not been sent, zeros for what is missing, waits for all, and begins anew.

        Collective: by the names of the parameters.

        Raises:
            HorovodInternalError: it could not be done; names the ranks and the tensors.
        """
        try:
            for bucket in self._buckets:
                if not bucket.given:
                    self._give(bucket)
            self._wait()
        finally:
            self.reset()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        left = self._left[parameter] = self._left[parameter] - 1
        if left < 0:
            raise AssertionError(TOO_MANY)
        if not self._awaits_end:
            pulse.mine().begin_step()
            self._awaits_end = at_end_of_backward(self._on_end)
        if left:
            return
        bucket = self._home[parameter]
        bucket.missing -= 1
        if not bucket.missing:
            self._give(bucket)

    @brief
    def _on_end(self) -> None:
        self._awaits_end = False
        if not all(bucket.given for bucket in self._buckets):
            return
        lacking = state.current().engine.wait_unless_needed(self._under_way())
        if lacking is None:
            self._wait()
        elif not self._has_warned:
            self._has_warned = True
            log.get_logger().warning(_EARLY, lacking)

    def _under_way(self) -> list[Entry]:
        handles = state.current().handles
        sums = [total for bucket in self._buckets for _, total in bucket.waiting]
        sparse = [handles[handle][0] for total in sums for handle in (total.indices, total.values)]
        return [*(bucket.entry for bucket in self._buckets if bucket.entry is not None), *sparse]

    def _wait(self) -> None:
        engine = state.current().engine
        for bucket in self._buckets:
            entry, bucket.entry = bucket.entry, None
            if entry is not None:
                results = engine.wait(entry)
                for parameter, result, (dense, ctx) in zip(bucket.dense, results, bucket.sent, strict=True):
                    _put(parameter, dense, self._combining.compression.decompress(result, ctx))
                    if parameter in bucket.made_dense and parameter.grad is not None:
                        parameter.grad = parameter.grad.to_sparse(bucket.made_dense[parameter])
                bucket.sent = []
            for parameter, handle in bucket.waiting:
                parameter.grad = synchronize(handle)
            bucket.waiting = []

    # One bucket ---------------------------------------------------------------------------------------------------------------------------

    def _give(self, bucket: _Bucket) -> None:
        how = self._combining
        bucket.given = True
        self._sort_out_sparse(bucket)
        tensors = []
        for parameter in bucket.dense:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            gradient = parameter.grad
            dense = gradient if gradient.is_contiguous() else gradient.contiguous()
            if dense.requires_grad:  # of backward(create_graph=True)
                dense = dense.detach()
            small, ctx = how.compression.compress(dense)
            bucket.sent.append((dense, ctx))
            tensors.append(small)
        if tensors:
            bucket.entry = Entry(self._request(bucket, tensors), tensors)
            state.current().engine.give(bucket.entry, patient=True)

    def _sort_out_sparse(self, bucket: _Bucket) -> None:
        how = self._combining
        for parameter, label in zip(bucket.members, bucket.labels, strict=True):
            gradient = parameter.grad
            if gradient is None and parameter in bucket.sparse:
                gradient = _without_rows(parameter, bucket.sparse[parameter])
            if gradient is None or not gradient.is_sparse:
                continue
            if how.sparse_as_dense:
                bucket.made_dense[parameter] = gradient.sparse_dim()
                parameter.grad = gradient.to_dense()
                continue
            if parameter not in bucket.sparse:
                bucket.sparse[parameter] = gradient.sparse_dim()
                bucket.request = None
            handle = asynchronous.sparse_allreduce_async(gradient, label, how.op, how.process_set)
            bucket.waiting.append((parameter, handle))

    def _request(self, bucket: _Bucket, tensors: Sequence[Tensor]) -> Request:
        how, here = self._combining, state.current()
        set_id = how.process_set.process_set_id or 0
        if bucket.request is None or bucket.request.set_id != set_id:  # another one after shutdown and init
            parts = tuple(Part(dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in tensors)
            labels = tuple(label for p, label in zip(bucket.members, bucket.labels, strict=True) if p not in bucket.sparse)
            bucket.request = Request(
                Kind.ALLREDUCE, here.name_for(Kind.ALLREDUCE, bucket.name, set_id), set_id, parts, tensors[0].device.type, how.op,
                how.prescale, how.postscale, labels=labels,
            )  # fmt: skip
        return bucket.request


def _without_rows(parameter: nn.Parameter, sparse_dim: int) -> Tensor:
    """A sparse gradient of nothing but zeros."""
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.detach().new_empty(0, *parameter.shape[sparse_dim:])
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False, device=parameter.device)


def _put(parameter: nn.Parameter, dense: Tensor, result: Tensor) -> None:
    """Makes `result` the gradient, of which `dense` was sent."""
    gradient = parameter.grad
    if gradient is dense and result is dense:
        return
    if parameter.grad is None:
        parameter.grad = dense
    if result.data_ptr() != parameter.grad.data_ptr():
        with torch.no_grad():
            parameter.grad.copy_(result)


def _bucket_name(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"
