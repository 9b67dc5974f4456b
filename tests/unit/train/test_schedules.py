from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from hora.train.schedules import decay_after_epoch, warmup_cosine


@pytest.mark.parametrize(("decay", "last", "factors"), [(0.5, 3, [1, 1, 1, 1, 0.5, 0.25]), (0.8, 0, [1, 0.8, 0.64]), (0.5, 9, [1, 1])])
def test_decay_begins_after_the_last_full_epoch(decay, last, factors):
    assert [decay_after_epoch(epoch, decay=decay, last_full_epoch=last) for epoch in range(len(factors))] == pytest.approx(factors)


def test_warmup_is_a_line_that_never_gives_zero():
    assert [warmup_cosine(step, warmup_steps=3, total_steps=10) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_cosine_ends_at_the_final_factor_in_the_last_step_and_stays():
    factor = partial(warmup_cosine, warmup_steps=2, total_steps=11, final_factor=0.1)
    assert factor(2) == 1.0
    assert factor(6) == pytest.approx(0.55)
    assert factor(10) == pytest.approx(0.1)
    assert factor(500) == pytest.approx(0.1)
    assert all(factor(step) > factor(step + 1) for step in range(2, 10))


@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(0, 1), (1, 1), (5, 3), (0, 0)])
def test_odd_lengths_give_factors_between_zero_and_one(warmup_steps, total_steps):
    factors = [warmup_cosine(step, warmup_steps=warmup_steps, total_steps=total_steps) for step in range(8)]
    assert all(0 <= factor <= 1 for factor in factors)


def test_they_fit_torchs_scheduler():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = LambdaLR(optimizer, partial(decay_after_epoch, decay=0.5, last_full_epoch=0))
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]
