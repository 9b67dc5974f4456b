"""Backend `shm`: ranks of one host that share memory, with tensors on the CPU.

It is a process group like any other to torch.distributed, so that DistributedDataParallel, FSDP, DCP and collectives of objects work on it.
All sums are in the order of the ranks, so that every rank has the same bits, in whatever pieces they travelled.
"""

import os
import platform
import sys

import torch
import torch.distributed as dist
from typing_extensions import override

from hora import env
from hora.comm.backends.base import Backend
from hora.comm.torch_private import Store


class Shm(Backend):
    """Shared memory between the ranks of one host."""

    name = "shm"
    device_types = ("cpu",)

    @override
    def unavailable_because(self, world_size: int) -> str | None:
        if sys.platform != "linux" or os.environ.get(env.PORTABLE) == "1":
            return "it needs Linux"
        from hora.comm.backends.shm.build import load_kernel

        if platform.machine() != "x86_64" and load_kernel() is None:
            return f"without a C compiler it needs a processor that keeps the order of its writes, and {platform.machine()} does not"
        return None

    @override
    def start_group(self, store: Store, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
        register()
        super().start_group(store, rank, world_size, device, timeout_s)


def register() -> None:
    """Makes torch.distributed know the backend: `init_process_group("shm")`."""
    if Shm.name not in dist.Backend.backend_list:
        from hora.comm.backends.shm.group import ShmGroup

        dist.Backend.register_backend(Shm.name, ShmGroup, devices=["cpu"])
