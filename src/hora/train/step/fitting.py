"""Micro-batches as large as fit into the memory of every rank, found by trying them before a step begins.

A rank that runs out of memory in the middle of a step leaves the others with half of a sum. So a micro-batch that is larger than any before is
tried first, alone: forward and backward, with nothing changed and nothing sent. Where it does not fit on some rank, all ranks cut theirs in two
and try again. The global batch stays what it is; only the order in which its gradients are added changes.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hora import log
from hora.comm.randomness import lent_generators
from hora.comm.session import session
from hora.errors import ConfigError, HoraError
from hora.sync.batch_norm import SyncBatchNorm
from hora.train.step.forward import Forward
from hora.train.step.tree import map_tensors, tensors_of

Agree = Callable[[str, float], list[float]]
"""Tells all ranks a number, under a name for messages; gives those of all. Collective."""


class OutOfMemory(HoraError):
    """Not even one sample fits into the memory of a rank."""


class FittingMicroBatches:
    """Cuts the micro-batches of steps so that they fit.

    Args:
        forward: what is tried.
        agree: tells the other ranks how it went.

    Attributes:
        most_samples: of a micro-batch; None while nothing has been too large.

    Raises:
        ConfigError: ranks talk to each other in the model.
    """

    def __init__(self, forward: Forward, agree: Agree) -> None:
        if any(isinstance(module, nn.SyncBatchNorm | SyncBatchNorm) for module in forward.model.modules()):
            raise ConfigError(
                'micro_batch_size="auto" tries a micro-batch on the ranks alone for which it is new, but this model has a SyncBatchNorm, in which '
                "ranks wait for each other; give the loader a micro_batch_size"
            )
        self._forward = forward
        self._agree = agree
        self._tried = 0
        self.most_samples: int | None = None

    def fit(self, micro_batches: Sequence[Any], states: Sequence[Any]) -> list[Any]:
        """The same samples in micro-batches that fit.

        Collective: all ranks call it once a step.

        Args:
            micro_batches: as the loader gave them, on the device.
            states: that they are to be computed with, by place.

        Raises:
            ConfigError: a micro-batch cannot be cut.
            OutOfMemory: a micro-batch of one sample does not fit; on all ranks alike.
        """
        while True:
            pieces = [piece for micro_batch in micro_batches for piece in cut(micro_batch, self.most_samples)]
            largest = max(pieces, key=_num_elements, default=None)
            is_new = largest is not None and _num_elements(largest) > self._tried
            if not any(self._agree("largest micro-batch", float(is_new))):
                return pieces
            failed = self._agree("fit", float(num_samples(largest) if is_new and not self._fits(largest, states) else 0))
            if not any(failed):
                self._tried = max(self._tried, 0 if largest is None else _num_elements(largest))
                return pieces
            self._cut_smaller([int(samples) for samples in failed], states)

    def _cut_smaller(self, failed: Sequence[int], states: Sequence[Any]) -> None:
        """`failed`: by rank how many samples were too many, or 0."""
        too_many = min(samples for samples in failed if samples)
        ranks = ", ".join(str(rank) for rank, samples in enumerate(failed) if samples)
        if too_many == 1:
            raise OutOfMemory(f"one sample at least must fit into the memory of each rank, but on rank {ranks} not even one does")
        if any(tensors_of(state) for state in states):
            raise ConfigError(
                f"a micro-batch of {too_many} samples does not fit on rank {ranks}, and cannot be cut while its state is carried from step to "
                "step; give the loader a smaller micro_batch_size"
            )
        self.most_samples = -(-too_many // 2)
        if session().rank == 0:
            log.get_logger().info("micro-batches of %d samples do not fit on rank %s: going on with %d", too_many, ranks, self.most_samples)

    def _fits(self, micro_batch: Any, states: Sequence[Any]) -> bool:
        """Whether forward and backward fit, beside the state that the optimizer is to have; leaves no trace."""
        forward = self._forward
        parameters = [parameter for parameter in forward.model.parameters() if parameter.requires_grad]
        device = session().device
        reserved: list[Tensor] = []
        fits = True
        try:
            with _untouched(forward.model, device):
                if not forward.optimizer.applied.state and device.type == "cuda":
                    reserved = [torch.empty(2 * sum(parameter.nbytes for parameter in parameters), dtype=torch.uint8, device=device)]
                with forward.autocast():
                    loss, *_ = forward.loss_fn(forward.model, micro_batch, states[0] if states else None)
                torch.autograd.grad(loss, parameters, allow_unused=True)
        except torch.OutOfMemoryError:
            fits = False
        del reserved
        if not fits:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        return fits


def cut(micro_batch: Any, most_samples: int | None) -> list[Any]:
    """Parts of at most so many samples; tensors are cut along their first dimension, numbers and scalars go with every part.

    Raises:
        ConfigError: tensors have different first dimensions.
    """
    if most_samples is None or (count := num_samples(micro_batch)) <= most_samples:
        return [micro_batch]
    return [
        map_tensors(lambda tensor: tensor[begin : begin + most_samples] if tensor.ndim else tensor, micro_batch)  # noqa: B023 (called at once)
        for begin in range(0, count, most_samples)
    ]


def num_samples(micro_batch: Any) -> int:
    """The first dimension of all its tensors.

    Raises:
        ConfigError: they have different ones, or none.
    """
    sizes = {tensor.size(0) for tensor in tensors_of(micro_batch) if tensor.ndim}
    if len(sizes) != 1:
        raise ConfigError(
            'micro_batch_size="auto" must be able to cut a micro-batch along the first dimension of its tensors, but these are '
            + (f"{sorted(sizes)} long" if sizes else "none")
        )
    return int(sizes.pop())


def _num_elements(micro_batch: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_of(micro_batch))


@contextmanager
def _untouched(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Inside the `with` block the model may be run: its buffers and the generators are put back, those of `random` and NumPy too."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with lent_generators(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
