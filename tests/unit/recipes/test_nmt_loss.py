import pytest
import torch
import torch.nn.functional as F

from hora.recipes.nmt.loss import loss_sums
from hora.recipes.nmt.symbols import PAD


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 5, 11, generator=generator)
    targets = torch.randint(1, 11, (4, 5), generator=generator)
    targets[0, 2:] = PAD
    targets[2] = PAD
    return logits.requires_grad_(), targets


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.7])
def test_smoothed_loss_and_its_gradient_are_those_of_torch(batch, label_smoothing):
    logits, targets = batch
    sums = loss_sums(logits, targets, label_smoothing=label_smoothing)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, label_smoothing=label_smoothing, reduction="sum")
    torch.testing.assert_close(sums.loss, expected)
    ours, theirs = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (sums.loss, expected))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        sums.nll, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum").detach()
    )


def test_weight_counts_what_the_loss_is_divided_by(batch):
    logits, targets = batch
    assert loss_sums(logits, targets).weight == 2 + 5 + 5
    assert loss_sums(logits, targets, normalization="sentences").weight == 3
    means = loss_sums(logits, targets, normalization="means", label_smoothing=0.1)
    rows = [F.cross_entropy(logits[row, :length], targets[row, :length], label_smoothing=0.1) for row, length in ((0, 2), (1, 5), (3, 5))]
    assert means.weight == 3
    torch.testing.assert_close(means.loss, torch.stack(rows).sum())


def test_batch_of_nothing_has_no_weight_and_finite_gradients(batch):
    logits, targets = batch
    for normalization in ("tokens", "sentences", "means"):
        sums = loss_sums(logits, torch.full_like(targets, PAD), label_smoothing=0.1, normalization=normalization)
        assert sums.loss == sums.weight == sums.nll == 0
        (gradient,) = torch.autograd.grad(sums.loss, logits)
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_half_precision_logits_are_summed_in_float32(batch):
    logits, targets = batch
    half = logits.detach().bfloat16()
    assert loss_sums(half, targets).loss == loss_sums(half.float(), targets).loss
