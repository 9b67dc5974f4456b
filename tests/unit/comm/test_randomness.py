import pytest
import torch

from hora.comm.randomness import seed_torch


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5, 2**64 - 1])
def test_seeds_as_torch_does(seed):
    torch.manual_seed(seed)
    expected = torch.rand(5)
    seed_torch(seed)
    assert torch.equal(torch.rand(5), expected)
