"""SyncBatchNorm: batch statistics over the batches of all ranks, on CPU and GPU, for any sizes of the ranks' batches.

The statistics are combined from each rank's mean and sum of squared deviations (Chan, Golub, LeVeque 1979), which does not cancel as sums of
squares do. One exchange in forward, one in backward, each of two numbers a channel.
"""

import weakref
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hora.comm.flat import all_gather_flat, all_reduce_flat
from hora.comm.session import session
from hora.errors import ConfigError


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose batch is the ranks' batches together. Parameters and buffers as `torch.nn.BatchNorm2d`.

    Collective: in training mode all ranks call it equally often, each with at least one sample. In evaluation it is local.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  (torch's name)
        if input.dim() < 2:
            raise ConfigError(f"SyncBatchNorm takes [batch, channels, ...], but got {input.dim()} dimensions instead")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """Normalises `input` [batch, channels, ...]; returns a tensor of the same shape."""
        self._check_input_dim(input)
        if not self._uses_batch():
            return super().forward(input)
        output, mean, variance, count = cast(Any, _Normalize).apply(input, self.weight, self.bias, self.eps)
        if self.training and self.track_running_stats:
            self._track(mean, variance, count)
        return cast(Tensor, output)

    def _uses_batch(self) -> bool:
        batch = self.training or (self.running_mean is None and self.running_var is None)
        return batch and session().world_size > 1

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / self.num_batches_tracked.to(self.running_mean.dtype) if self.momentum is None else self.momentum
        unbiased = variance * count / (count - 1).clamp(min=1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class SyncedNorms:
    """The layers of `model` in which ranks wait for each other in forward: Hora's and torch's SyncBatchNorm."""

    def __init__(self, model: nn.Module) -> None:
        alone = session().world_size == 1
        synced = [] if alone else [module for module in model.modules() if isinstance(module, SyncBatchNorm | nn.SyncBatchNorm)]
        self._layers: weakref.WeakSet[_BatchNorm] = weakref.WeakSet(synced)

    def require_even(self, step: Iterable[Any]) -> None:
        """Refuses a step that tells how many micro-batches each rank has (`hora.data.steps.Step.counts`), and where these differ.

        Raises:
            ConfigError: on every rank alike.
        """
        counts = getattr(step, "counts", None)
        if counts is None or not any(layer.training or layer.running_mean is None for layer in self._layers):
            return
        if len(set(found := counts())) > 1:
            raise ConfigError(
                "with SyncBatchNorm, whose batch is that of all ranks, these must have equally many micro-batches in each step, but in "
                f"{step!r} they have {', '.join(map(str, found))}; use drop_last=True, and a global_batch_size that goes into equal micro-batches "
                "on all ranks"
            )


def convert_sync_batch_norm(module: nn.Module) -> nn.Module:
    """Returns `module` with every BatchNorm layer in it replaced by a `SyncBatchNorm` that has the same parameters and buffers."""
    converted = module
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm | nn.SyncBatchNorm):
        converted = SyncBatchNorm(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
        converted.weight, converted.bias = module.weight, module.bias
        converted.running_mean, converted.running_var = module.running_mean, module.running_var
        converted.num_batches_tracked = module.num_batches_tracked
        converted.train(module.training)
    for name, child in module.named_children():
        setattr(converted, name, convert_sync_batch_norm(child))
    return converted


class _Normalize(torch.autograd.Function):
    """Normalises over all ranks; its gradients are those of one process that has all the samples."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # Statistics of half-precision givens are taken in float32, as torch's own SyncBatchNorm does.
        values = given.float() if given.dtype in (torch.float16, torch.bfloat16) else given
        mean, variance, count = _global_statistics(values)
        shape = _per_channel(values)
        inverse = torch.rsqrt(variance + eps)
        normalized = (values - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normalized, inverse, weight, count)
        output = normalized
        if weight is not None and bias is not None:
            output = normalized * weight.view(shape) + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(given.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        normalized, inverse, weight, count = ctx.saved_tensors
        gradient = gradients[0].to(normalized.dtype)
        shape, axes = _per_channel(normalized), _all_but_channels(normalized)
        local = torch.stack([gradient.sum(axes), (gradient * normalized).sum(axes)])
        total = all_reduce_flat(local.flatten().clone(), waits=True).wait().view_as(local) / count
        scale = inverse if weight is None else inverse * weight
        input_gradient = (gradient - total[0].view(shape) - normalized * total[1].view(shape)) * scale.view(shape)
        # The parameters' gradients stay this rank's own sums: the optimizer's strategy adds them up with all the others.
        weight_gradient = None if weight is None else local[1]
        bias_gradient = None if weight is None else local[0]
        return input_gradient.to(gradients[0].dtype), weight_gradient, bias_gradient, None


def _global_statistics(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [channels], biased variance [channels] and number of values a channel (scalar) over all ranks. Collective."""
    axes = _all_but_channels(values)
    count = values.new_tensor([values.numel() / values.size(1)])
    mean = values.mean(axes)
    deviation = (values - mean.view(_per_channel(values))).square().sum(axes)
    mine = torch.cat([mean, deviation, count])
    # Not agreed on one by one: a message between the hosts for each layer of each micro-batch would cost more than the layer.
    rows = all_gather_flat(mine.new_empty(session().world_size * mine.numel()), mine, waits=True).wait().view(-1, mine.numel())
    channels = values.size(1)
    means, deviations, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    variance = (deviations + counts * (means - mean).square()).sum(0) / total
    return mean, variance, total


def _per_channel(values: Tensor) -> list[int]:
    return [1, -1] + [1] * (values.dim() - 2)


def _all_but_channels(values: Tensor) -> list[int]:
    return [axis for axis in range(values.dim()) if axis != 1]
