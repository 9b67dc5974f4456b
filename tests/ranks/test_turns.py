import threading

import pytest
import torch

import hora
from hora.errors import ConfigError, PeerLost
from hora.testing import run_ranks

LONG_ENOUGH_TO_BE_CAUGHT_S = 0.1


@run_ranks(1, 2, 4)
def test_rank_zero_is_done_before_any_other_begins(world_size):
    store = hora.session().store
    for number in range(3):
        hora.barrier()
        with hora.rank_zero_first():
            if hora.rank() == 0:
                threading.Event().wait(LONG_ENOUGH_TO_BE_CAUGHT_S)
            assert (store.add(f"begun-{number}", 1) == 1) == (hora.rank() == 0)
        hora.barrier()
        assert store.add(f"begun-{number}", 0) == world_size


@run_ranks(1, 2)
def test_a_collective_in_the_block_is_told_instead_of_waited_for(world_size):
    def together():
        with hora.rank_zero_first():
            hora.DataLoader(range(4), global_batch_size=2)

    if world_size == 1:
        together()
        return

    kind, message = (
        (ConfigError, "all_gather_object of what a DataLoader was given' inside rank_zero_first.*after the block")
        if hora.rank() == 0
        else (PeerLost, "went first and")
    )
    with pytest.raises(kind, match=message):
        together()
    assert hora.all_reduce(torch.ones(1)).item() == 2


@run_ranks(2)
def test_the_others_still_wait_when_a_block_inside_the_block_is_done(world_size):
    with hora.rank_zero_first():
        with hora.rank_zero_first():
            pass
        assert hora.session().progress.awaited_by_others == (hora.rank() == 0)
    assert not hora.session().progress.awaited_by_others
