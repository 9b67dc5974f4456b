"""Each rank uses its own GPU alone: no context and no tensor of another rank on GPU 0."""

import os
import subprocess

import gpu_ranks
import pytest
import torch

import hora
from hora.testing import run_ranks

WORLD_SIZES = [n for n in (1, 2, 4) if n in gpu_ranks.UNSHARED]


def processes_by_gpu() -> dict[str, list[int]]:
    """Process numbers by GPU, as the driver lists them."""
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    found: dict[str, list[int]] = {}
    for line in listed.splitlines():
        uuid, pid = line.split(", ")
        found.setdefault(uuid, []).append(int(pid))
    return found


@run_ranks(*WORLD_SIZES, backend="nccl", timeout_s=120)
def test_a_rank_has_tensors_on_its_own_gpu_alone() -> None:
    torch.cuda.reset_peak_memory_stats()  # ranks are reused by tests
    model = torch.nn.Linear(256, 256).to(hora.device())
    optimizer = hora.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    for _ in range(3):
        for x in optimizer.micro_batches([torch.randn(4, 256, device=hora.device())]):
            optimizer.backward(model(x).sum(), weight=4)
        optimizer.step()
    hora.broadcast_optimizer_state(optimizer)
    allocated = hora.all_gather_object(torch.cuda.max_memory_allocated())
    assert max(allocated) - min(allocated) <= 2**20, f"the ranks' memory differs: {allocated} bytes"
    for other in range(torch.cuda.device_count()):
        if other != hora.local_rank():
            assert torch.cuda.memory_allocated(other) == 0


@run_ranks(*WORLD_SIZES, backend="nccl", timeout_s=120)
def test_the_driver_sees_each_rank_on_one_gpu() -> None:
    hora.barrier()
    pids = hora.all_gather_object(os.getpid())
    listed = hora.broadcast_object(processes_by_gpu() if hora.rank() == 0 else None)
    hora.barrier()  # nobody leaves before the driver was asked
    if not any(pid in pids for on_gpu in listed.values() for pid in on_gpu):
        pytest.skip("the driver does not list this container's processes")
    for rank, pid in enumerate(pids):
        assert sum(pid in on_gpu for on_gpu in listed.values()) == 1, f"rank {rank} (process {pid}) has contexts on several GPUs: {listed}"
