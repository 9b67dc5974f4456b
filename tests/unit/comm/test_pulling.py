"""Sums that ranks fetch of each other: the parts of all ranks together, in the order of the tree, on CPUs, where no copy is under way meanwhile."""

import pytest
import torch

from hora.comm.peer_memory.pulling import Layout, Pulling
from hora.plan.logical import LogicalRanks


@pytest.mark.parametrize("world", range(2, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_parts_of_all_ranks_make_the_sum(world, dtype):
    numels = [1, 63, 64, 65, 1000, 4096, 100_003]
    layout = Layout(numels, [dtype.itemsize] * len(numels), world)
    memory = [torch.zeros(layout.size_bytes, dtype=torch.uint8) for _ in range(world)]
    fault = torch.zeros((), dtype=torch.int32)
    ranks = [Pulling(memory, layout, [dtype] * len(numels), r, 1.0, fault) for r in range(world)]
    for index, numel in enumerate(numels):
        parts = [(torch.randn(numel) * 100).to(dtype) for _ in range(world)]
        for part, rank in zip(parts, ranks, strict=True):
            rank.tensors[index].copy_(part)
        want = LogicalRanks(world, world).total([(range(i, i + 1), part.clone()) for i, part in enumerate(parts)], torch.add)
        for rank in ranks:
            rank.sum_part(index)
        for rank in ranks:
            rank.gather_parts(index)
        for rank in ranks:
            assert torch.equal(rank.tensors[index], want), numel
    assert all(not share[: 3 * world * 8].any() for share in memory), "flags are no part of a tensor"
