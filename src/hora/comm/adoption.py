"""Working in a process group that the user's own script has made: it is used as it is, and stays when Hora leaves."""

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from typing_extensions import override

from hora.comm.backends.base import Backend
from hora.comm.backends.mpi.meeting import AtMpi
from hora.comm.backends.shm import new_group_on_cpus
from hora.comm.deadline import Deadline
from hora.comm.meeting import Meeting
from hora.comm.places import Place
from hora.comm.torch_private import Store, store_of_group
from hora.errors import ConfigError
from hora.topology import Topology, knows_local_rank, knows_node_rank


@dataclass(frozen=True)
class AtGroup(Meeting):
    """The store through which torch.distributed's default group was made."""

    @property
    @override
    def hint(self) -> str:
        return "call hora.init on every rank of the group"

    @override
    def open(self, rank: int, world_size: int, deadline: Deadline, release: ExitStack) -> Store:
        return store_of_group()


class AdoptedGroup(Backend):
    """The backend of a group that exists already."""

    def __init__(self) -> None:
        self.name = str(dist.get_backend())
        self.device_types = ("cuda",) if self.name == "nccl" else ("cpu",)
        self._own: dist.ProcessGroup | None = None

    @override
    def unavailable_because(self, world_size: int) -> str | None:
        return None

    @override
    def environment(self, interface: str) -> Mapping[str, str]:
        return {"GLOO_SOCKET_IFNAME": interface}

    @override
    def start_group(self, store: Store, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
        pass

    @override
    def group_of_hosts(self, timeout_s: float, *, one_host: bool) -> dist.ProcessGroup | None:
        self._own = None if "cpu" in self.device_types else new_group_on_cpus(timeout_s, one_host=one_host)
        return self._own or dist.group.WORLD

    @override
    def end_group(self) -> None:
        if self._own is not None and dist.is_initialized():
            dist.destroy_process_group(self._own)


def adopt(
    backend: str | None, device: torch.device | None, placed: bool, environ: Mapping[str, str] = os.environ
) -> tuple[Place, Backend, torch.device]:
    """The place of this process in torch.distributed's default group, its backend, and its device.

    Args:
        backend: what was asked for.
        device: what was asked for.
        placed: whether `init` was told where to meet.
        environ: variables to read local ranks from.

    Raises:
        ConfigError: what was asked for is not what there is.
    """
    group = AdoptedGroup()
    if placed or backend not in (None, group.name):
        raise ConfigError(
            f"torch.distributed has been initialised already (backend {group.name}, rank {dist.get_rank()} of {dist.get_world_size()}) and is "
            "used as it is; call hora.init without init_method, rank, world_size and backend, or before torch.distributed is initialised"
        )
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if "cuda" in group.device_types else torch.device("cpu")
    topology = _topology(environ)
    # Torch makes a group of backend mpi without a store.
    meeting = AtMpi() if group.name == "mpi" else AtGroup()
    known = knows_local_rank(topology.source, environ), knows_node_rank(topology.source, environ)
    return Place(topology, *known, meeting), group, device


def _topology(environ: Mapping[str, str]) -> Topology:
    """What the launcher said, if it is about this group; else the bare rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with suppress(ConfigError):
        found = Topology.from_env(environ)
        if found.source != "alone" and (found.rank, found.world_size) == (rank, world_size):
            return found
    return Topology(rank=rank, world_size=world_size, source="torch.distributed")
