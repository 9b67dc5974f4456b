"""The loader in a process that uses CUDA: workers that are not forked, and pinned memory."""

import os

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import hora

pytestmark = pytest.mark.gpu


class Numbers(Dataset[Tensor]):
    """The samples 0 to 39, and the parent of the process that loads them."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, os.getppid()])


def test_workers_are_not_forked_and_load_into_pinned_memory() -> None:
    torch.zeros(1, device="cuda")
    loader = hora.DataLoader(Numbers(), global_batch_size=16, micro_batch_size=5, num_workers=2, pin_memory=True, rank=0, world_size=1)
    for _ in range(2):
        batches = [micro_batch for step in loader for micro_batch in step]
        assert all(batch.is_pinned() for batch in batches)
        samples, parents = torch.cat(batches).T
        assert sorted(samples.tolist()) == list(range(40))
        assert os.getpid() not in parents.tolist()


def test_tensors_on_the_gpu_are_taken_where_they_are() -> None:
    dataset = TensorDataset(torch.arange(40, device="cuda"), torch.arange(40))
    for step in hora.DataLoader(dataset, global_batch_size=16, rank=0, world_size=1):
        for there, here in step:
            assert there.is_cuda
            assert torch.equal(there.cpu(), here)
