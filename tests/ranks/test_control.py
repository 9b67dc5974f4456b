"""What ranks say of an update: early, where hosts run ahead of their devices, and again with its numbers."""

import time
from datetime import timedelta

import pytest
import torch

from hora.comm.session import session
from hora.errors import CollectiveMismatch
from hora.sync.control import ControlMessage
from hora.testing import run_ranks

MODEL = "model 0 (weight)"
AHEAD = torch.device("meta")
"""A device that is none of the host's, of which there is one everywhere."""


@run_ranks(1, 2, 3)
def test_an_opened_update_has_the_weights_and_flags_of_all(world_size: int) -> None:
    rank = session().rank
    control = ControlMessage("plan", MODEL, torch.device("cpu"))
    for step in range(3):
        control.open(step)
        control.begin(step, {0: rank + 1.0}, stop=step == 2 and rank == world_size - 1, waits=False)
        control.agree()
        assert float(control.end()) == sum(range(1, world_size + 1))
        assert control.stop_agreed == (step == 2)


@run_ranks(2, 3)
def test_gradients_of_an_opened_update_wait_for_no_host() -> None:
    here = session()
    control = ControlMessage("plan", MODEL, AHEAD)
    control.open(0)
    if here.rank == 1:  # late with its last backward: the others' gradients have begun to move by then
        here.store.wait([f"moving/{rank}" for rank in range(here.world_size) if rank != 1], timedelta(seconds=60))
    control.begin(0, {0: 1.0}, stop=False, waits=False)
    assert control.agree() is None
    here.store.set(f"moving/{here.rank}", "")
    control.end()
    assert control.suspicious is False


@run_ranks(2, 3)
def test_gradients_of_an_update_that_nobody_has_opened_wait_for_all_hosts() -> None:
    here = session()
    control = ControlMessage("plan", MODEL, AHEAD)
    if here.rank == 1:
        time.sleep(0.3)
        assert not here.store.check(["moved"])
    control.begin(0, {0: 1.0}, stop=False, waits=False)
    assert control.agree() is None
    here.store.set("moved", "")
    control.end()


@run_ranks(2, 3)
def test_no_gradient_moves_where_a_rank_opens_another_update() -> None:
    other = session().rank == 1
    control = ControlMessage("another plan" if other else "plan", "model 1 (bias)" if other else MODEL, AHEAD)
    control.open(0)
    with pytest.raises(
        CollectiveMismatch, match=r"sum update 0 of model 0 \(weight\).*rank 1 is about to sum update 0 of model 1 \(bias\)"
    ):
        control.begin(0, {0: 1.0}, stop=False, waits=False)
