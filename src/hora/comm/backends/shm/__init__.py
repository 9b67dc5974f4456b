"""Backend `shm`: ranks of one host that share memory, with tensors on the CPU.

It is a process group like any other to torch.distributed, so that DistributedDataParallel, FSDP, DCP and collectives of objects work on it.
All sums are in the order of the ranks, so that every rank has the same bits, in whatever pieces they travelled.
"""

import os
import sys
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from typing_extensions import override

from hora import env, log
from hora.comm.backends.base import Backend
from hora.comm.backends.gloo import Gloo
from hora.comm.backends.shm.segment import CannotShare
from hora.comm.torch_private import Store


class Shm(Backend):
    """Shared memory between the ranks of one host."""

    name = "shm"
    device_types = ("cpu",)
    one_host = True

    @override
    def unavailable_because(self, world_size: int) -> str | None:
        return "it needs Linux" if sys.platform != "linux" or os.environ.get(env.PORTABLE) == "1" else None

    @override
    def environment(self, interface: str) -> Mapping[str, str]:
        return Gloo().environment(interface)

    @override
    def stand_in(self) -> Backend:
        return Gloo()

    @override
    def start_group(self, store: Store, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
        register()
        super().start_group(store, rank, world_size, device, timeout_s)


def register() -> None:
    """Makes torch.distributed know the backend: `init_process_group("shm")`."""
    if Shm.name not in dist.Backend.backend_list:
        from hora.comm.backends.shm.group import ShmGroup

        dist.Backend.register_backend(Shm.name, ShmGroup, devices=["cpu"])


def new_group_on_cpus(timeout_s: float, *, one_host: bool) -> dist.ProcessGroup:
    """A group of all ranks for tensors on the CPU: in shared memory if they can share it, else over the network.

    Collective: all ranks call it, with one `one_host`: whether to try.
    """
    timeout = timedelta(seconds=timeout_s)
    if one_host and Shm().unavailable_because(dist.get_world_size()) is None:
        register()
        try:
            shared: dist.ProcessGroup = dist.new_group(backend=Shm.name, timeout=timeout)
            return shared
        except CannotShare as error:
            log.get_logger().debug("%s", error)
    networked: dist.ProcessGroup = dist.new_group(backend=Gloo.name, timeout=timeout)
    return networked
