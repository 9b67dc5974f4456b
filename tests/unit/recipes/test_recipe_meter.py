import math

import pytest
import torch

import hora
from hora.recipes.meter import Meter, NonFiniteLoss, RunningTally, Tally
from hora.testing import run_ranks


def test_perplexity_is_the_exponential_of_the_mean() -> None:
    tally = Tally(math.log(8.0) * 5, 5)
    assert tally.perplexity == pytest.approx(8.0)
    assert (tally + Tally(0.0, 5)).perplexity == pytest.approx(math.sqrt(8.0))


def test_perplexity_of_nothing_and_of_too_much_are_no_errors() -> None:
    assert math.isnan(Tally().perplexity)
    assert Tally(1e6, 1).perplexity == math.inf


@run_ranks(1, 2, 3)
def test_collected_losses_are_those_of_all_ranks() -> None:
    meter = Meter(hora.device())
    for step in range(hora.rank()):  # rank 0 adds nothing
        meter.add(torch.tensor(10.0 + step, device=hora.device()), 4, step, hora.rank())
    ranks = hora.world_size()
    expected = sum(10.0 + step for rank in range(ranks) for step in range(rank))
    assert meter.collect() == Tally(expected, 4 * sum(range(ranks)))


@run_ranks(1, 2)
def test_small_losses_are_not_lost_in_a_large_sum() -> None:
    meter = Meter(hora.device())
    meter.add(torch.tensor(2.0**24, device=hora.device()), 1, 0, hora.rank())
    for _ in range(8):
        meter.add(torch.tensor(0.5, device=hora.device()), 1, 0, hora.rank())
    assert meter.collect().nll == (2.0**24 + 4) * hora.world_size()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@run_ranks(2, 3)
def test_loss_that_is_not_finite_is_reported_on_all_ranks_with_step_and_rank(bad: float) -> None:
    meter = Meter(hora.device())
    for step in range(5):
        spoilt = (step >= 2 and hora.rank() == 1) or step >= 3
        meter.add(torch.tensor(bad if spoilt else 1.0, device=hora.device()), 1, step, hora.rank())
    with pytest.raises(NonFiniteLoss, match=r"step 2 of an evaluation \(rank 1\)"):
        meter.collect()


def test_running_tally_goes_on_from_what_was_added_before() -> None:
    running = RunningTally(torch.device("cpu"))
    running.reset(Tally(4.0, 3))
    running.add(torch.tensor(2.0**24), 4)
    for _ in range(8):
        running.add(torch.tensor(0.5), 1)
    assert running.read() == running.read() == Tally(2.0**24 + 8, 15)
    running.reset()
    assert running.read() == Tally()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_running_tally_refuses_a_loss_that_is_not_finite(bad: float) -> None:
    running = RunningTally(torch.device("cpu"))
    running.add(torch.tensor(1.0), 100)
    running.add(torch.tensor(bad), 100)
    with pytest.raises(NonFiniteLoss, match="one of the last 200 tokens of training"):
        running.read()
    images = RunningTally(torch.device("cpu"), "images")
    images.add(torch.tensor(bad), 64)
    with pytest.raises(NonFiniteLoss, match="one of the last 64 images of training"):
        images.read()
