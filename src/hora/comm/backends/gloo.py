"""Gloo: collectives between CPUs over TCP, on every platform that PyTorch runs on."""

from collections.abc import Mapping

import torch.distributed as dist
from typing_extensions import override

from hora.comm.backends.base import Backend


class Gloo(Backend):
    """PyTorch's own backend for CPU tensors."""

    name = "gloo"
    device_types = ("cpu",)

    @override
    def unavailable_because(self, world_size: int) -> str | None:
        return None if dist.is_gloo_available() else "this build of PyTorch has no Gloo"

    @override
    def environment(self, interface: str) -> Mapping[str, str]:
        return {"GLOO_SOCKET_IFNAME": interface}
