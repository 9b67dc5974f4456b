"""How sums in shared GPU memory are dealt to blocks; the kernels are tested on GPUs."""

import pytest

from hora.comm.peer_memory.window import _SLOT_BYTES, MOST_BLOCKS, _launches, flag_bytes, reads_all, window_bytes


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize("blocks", [1, 7, MOST_BLOCKS])
@pytest.mark.parametrize("item_bytes", [2, 4, 8])
def test_every_element_is_summed_once_and_no_slot_overflows(world_size, blocks, item_bytes):
    for numel in (1, 15, 16, 17, 8191, 100_003, 1 << 20, 50_000_001):
        for read_all in (None, False, True):
            launches = _launches(numel, item_bytes, world_size, blocks, read_all)
            covered = [element for launch in launches for element in (launch.begin, launch.begin + launch.numel)]
            assert covered[0] == 0
            assert covered[-1] == numel
            assert covered[1:-1:2] == covered[2:-1:2]
            for launch in launches:
                shares = 1 if launch.read_all else world_size
                assert launch.part * shares * item_bytes <= _SLOT_BYTES
                assert launch.part % 16 == 0
                assert 1 <= launch.blocks <= blocks
                assert (launch.blocks - 1) * launch.part * shares < launch.numel  # each block has a tile
                assert launch.whole == (launch.numel == numel)


def test_a_window_has_room_for_flags_and_slots():
    assert window_bytes(8, MOST_BLOCKS) == flag_bytes(8, MOST_BLOCKS) + (64 << 20)
    assert flag_bytes(2, 1) == 4096
    assert flag_bytes(8, 64) == 2 * 64 * 8 * 8


def test_a_gpu_reads_all_numbers_where_a_second_wait_takes_longer():
    assert reads_all(1 << 30, 2)  # as many bytes either way
    assert [reads_all(512 << 10, n) for n in (3, 4, 8)] == [True, True, False]
    assert [reads_all(64 << 20, n) for n in (3, 4, 8)] == [False] * 3
