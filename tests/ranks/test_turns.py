import threading

import hora
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
