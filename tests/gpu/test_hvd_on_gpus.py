"""Horovod's operations and optimizer on GPUs: data by NCCL in the engine's own stream, agreement between the hosts."""

import torch
from gpu_ranks import WORLD_SIZES
from torch import nn

import hora.hvd as hvd
from hora.testing import run_ranks


@run_ranks(*WORLD_SIZES[:2], backend="nccl")
def test_operations_by_name_on_gpus(world_size):
    hvd.init()
    try:
        rank, size, device = hvd.rank(), hvd.size(), torch.device("cuda", torch.cuda.current_device())
        for step in range(4):
            order = range(30) if rank else reversed(range(30))
            handles = {n: hvd.allreduce_async(torch.full((1000,), float(n + step), device=device), name=f"t{n}") for n in order}
            for n, handle in handles.items():
                assert hvd.synchronize(handle).eq(n + step).all()
        assert hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum).tolist() == [size * (size - 1) / 2]  # of the host
        assert hvd.allgather(torch.full((rank + 1,), rank, device=device)).device.type == "cuda"
        assert hvd.alltoall(torch.arange(size, device=device)).tolist() == [rank] * size
        assert hvd.reducescatter(torch.ones(size, device=device, dtype=torch.bfloat16), op=hvd.Sum).item() == size
        assert hvd.broadcast_object({"a": torch.ones(2, device=device)} if rank == 0 else None)["a"].device.type == "cuda"
        hvd.join()
    finally:
        hvd.shutdown()


@run_ranks(*WORLD_SIZES[1:2], backend="nccl")
def test_tensors_may_be_on_another_gpu(world_size):
    """As of a model that is spread over several: here, each rank uses the other's too."""
    hvd.init()
    try:
        mine = torch.device("cuda", torch.cuda.current_device())
        other = torch.device("cuda", (mine.index + 1) % torch.cuda.device_count())
        rank, size = hvd.rank(), hvd.size()
        for device in (other, mine):
            found = hvd.allreduce(torch.full((3,), float(rank), device=device), op=hvd.Sum)
            assert (found.device, found.tolist()) == (device, [size * (size - 1) / 2] * 3)
            assert hvd.allgather(torch.ones(2, device=device)).device == device
        handles = [hvd.allreduce_async(torch.full((5,), float(n), device=(mine, other)[n % 2]), name=f"t{n}") for n in range(6)]
        assert [hvd.synchronize(handle).unique().item() for handle in handles] == [0, 1, 2, 3, 4, 5]
        first, second = nn.Linear(4, 3, device=mine), nn.Linear(3, 1, device=other)
        model = nn.ModuleList([first, second])
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
        second(first(torch.full((2, 4), rank + 1.0, device=mine)).to(other)).sum().backward()
        optimizer.step()
        told = hvd.allgather_object([parameter.tolist() for parameter in model.parameters()])
        assert told[0] == told[1]
    finally:
        hvd.shutdown()


@run_ranks(*WORLD_SIZES[:2], backend="nccl")
def test_updates_on_gpus_are_those_of_one_process(world_size):
    hvd.init()
    try:
        rank, size = hvd.rank(), hvd.size()

        def train(share: slice, wrap: bool) -> torch.Tensor:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8)).cuda()
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            if wrap:
                optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
            for step in range(5):
                inputs = torch.randn(24, 64, generator=torch.Generator().manual_seed(step))[share].cuda()
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            return torch.cat([p.detach().flatten() for p in model.parameters()])

        assert torch.allclose(train(slice(rank, None, size), True), train(slice(None), False), rtol=1e-4, atol=1e-5)
    finally:
        hvd.shutdown()
