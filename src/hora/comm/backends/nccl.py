"""NCCL: collectives between NVIDIA GPUs over NVLink, PCIe and the network. Their hosts talk through shared memory or Gloo."""

import socket
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from typing_extensions import override

from hora.comm.backends.base import Backend
from hora.comm.backends.shm import new_group_on_cpus
from hora.comm.interfaces import variables_set
from hora.comm.torch_private import Store

_FIRST = {"TORCH_NCCL_HIGH_PRIORITY": "1"}
"""A sum gets its place on the GPU before what is computed meanwhile.

In the environment, because torch warns of options with another timeout than the group's, and theirs has no public name.
"""


class Nccl(Backend):
    """NVIDIA's library, one rank a GPU, or several where they may share it."""

    name = "nccl"
    device_types = ("cuda",)

    @override
    def unavailable_because(self, world_size: int) -> str | None:
        if not dist.is_nccl_available():
            return "this build of PyTorch has no NCCL"
        if not dist.is_gloo_available():
            return "this build of PyTorch has no Gloo, through which the hosts talk"
        return None if torch.cuda.is_available() else "no CUDA device is visible"

    @override
    def environment(self, interface: str) -> Mapping[str, str]:
        return {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}

    @override
    def environment_on_shared_gpu(self, turn: int) -> Mapping[str, str]:
        # NCCL refuses two ranks of one host on one GPU, so that ranks of different turns must pass for ranks of different hosts.
        return {"NCCL_HOSTID": f"{socket.gethostname()}/{turn}"} if turn else {}

    @override
    def group_of_hosts(self, timeout_s: float, *, one_host: bool) -> dist.ProcessGroup | None:
        return new_group_on_cpus(timeout_s, one_host=one_host)

    @override
    def start_group(self, store: Store, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
        # With device_id the communicator is made at once and on this GPU alone: no context appears on GPU 0.
        with variables_set(_FIRST):
            dist.init_process_group(
                self.name, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s), device_id=device
            )
