from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from hora.train.schedules import Plateau, decay_after_epoch, linear_decay, noam, warmup_cosine, warmup_isqrt


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


def test_noam_rises_to_the_end_of_the_warmup_and_falls_as_a_root():
    factor = partial(noam, d_model=512, warmup_steps=4000)
    assert factor(0) == pytest.approx(10 * 512**-0.5 * 4000**-1.5)
    assert factor(3999) == pytest.approx(10 * 512**-0.5 * 4000**-0.5)
    assert factor(15999) == pytest.approx(factor(3999) / 2)
    assert max(range(8000), key=factor) == 3999
    assert noam(0, d_model=4, warmup_steps=0) == 5.0


def test_isqrt_begins_at_its_first_factor_and_falls_after_the_decay_steps():
    factor = partial(warmup_isqrt, warmup_steps=5, decay_steps=8, init_factor=0.2)
    assert [factor(step) for step in range(8)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1])
    assert factor(31) == pytest.approx(0.5)
    assert warmup_isqrt(10**6, warmup_steps=0, decay_steps=None) == 1.0
    assert warmup_isqrt(0, warmup_steps=1, decay_steps=4) == 1.0


def test_line_ends_at_the_final_factor_and_stays():
    assert [linear_decay(step, decay_steps=4, final_factor=0.5) for step in (0, 2, 4, 9)] == [1.0, 0.75, 0.5, 0.5]


@pytest.mark.parametrize("best", ["min", "max"])
def test_plateau_falls_after_more_than_its_patience(best):
    plateau = Plateau(patience=1, scale=0.5, best=best, final_factor=0.3)
    sign = 1 if best == "min" else -1
    factors = []
    for value in (5, 4, 4, 6, 4.5, 3, 3, 3, 3):
        plateau.update(sign * value)
        factors.append(plateau.factor)
    assert factors == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.3, 0.3]


def test_plateau_goes_on_from_its_state():
    one, other = (Plateau(patience=1, scale=0.5) for _ in range(2))
    for value in (3, 4):
        one.update(value)
    other.load_state_dict(one.state_dict())
    other.update(4)
    assert other.factor == 0.5
