"""What one process without Hora computes: the oracle of parity tests."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

LossSum = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Loss of a batch, summed over its samples."""


def global_gradients(model: nn.Module, inputs: Tensor, targets: Tensor, loss_sum: LossSum) -> dict[str, Tensor | None]:
    """Gradients of the mean loss over the whole batch, by name, on one process; `model` keeps its own `.grad`."""
    parameters = dict(model.named_parameters())
    trainable = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    loss = loss_sum(model, inputs, targets) / len(inputs)
    gradients = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
    return dict(zip(trainable, gradients, strict=True))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[tuple[Tensor, Tensor]],
    loss_sum: LossSum,
    clip_norm: float | None = None,
) -> None:
    """The plain loop on whole global batches."""
    for inputs, targets in steps:
        optimizer.zero_grad()
        (loss_sum(model, inputs, targets) / len(inputs)).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()


def assert_same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None], relative: float) -> None:
    """Fails unless both have the same names and each tensor differs by at most `relative` times the largest value in it.

    A tensor that is zero but for rounding (the gradient of a bias before BatchNorm) has no scale of its own: at least a thousandth of the
    largest value of all tensors counts as its scale.
    """
    assert found.keys() == expected.keys(), f"names differ: {sorted(found.keys() ^ expected.keys())}"
    floor = 1e-3 * max((_largest(tensor) for tensor in expected.values() if tensor is not None), default=0.0)
    for name, wanted in expected.items():
        got = found[name]
        assert (got is None) == (wanted is None), f"{name}: {'nothing' if got is None else 'a tensor'} found, the other expected"
        if got is None or wanted is None:
            continue
        assert got.shape == wanted.shape, f"{name}: shape {list(got.shape)} found, {list(wanted.shape)} expected"
        error, bound = _largest(got.to_dense() - wanted.to_dense()), relative * max(_largest(wanted), floor)
        assert error <= bound, f"{name}: differs by {error:.3g}, allowed are {bound:.3g}"


def _largest(tensor: Tensor) -> float:
    return tensor.to_dense().abs().max().item() if tensor.numel() else 0.0
