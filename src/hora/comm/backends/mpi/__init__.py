"""Backend `mpi`: whatever MPI mpi4py finds, with tensors on the CPU; PyTorch need not be built for it.

Ranks are those that the MPI's own launcher (`mpiexec`) or `hora run --mpi` has started. It is a process group like any other to
torch.distributed. mpi4py is loaded when the first group is made.
"""

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from typing_extensions import override

from hora.comm.backends.base import Backend
from hora.comm.backends.mpi.library import library, take_charge, why_not_here
from hora.comm.torch_private import Store, give_store, provide_mpi
from hora.errors import ConfigError

_LAUNCHERS = ("PMI_RANK", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


class Mpi(Backend):
    """MPI between CPUs."""

    name = "mpi"
    device_types = ("cpu",)

    @override
    def unavailable_because(self, world_size: int) -> str | None:
        if (reason := why_not_here()) is not None:
            return reason
        if world_size > 1 and not any(name in os.environ for name in _LAUNCHERS):
            return "the ranks were not started by an MPI: start with `hora run --mpi` or `mpiexec`"
        return None

    @override
    def environment(self, interface: str) -> Mapping[str, str]:
        return {"FI_TCP_IFACE": interface}

    @override
    def start_group(self, store: Store, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
        library().require_place(rank, world_size)
        register()
        dist.init_process_group(self.name, timeout=timedelta(seconds=timeout_s))
        give_store(store)


def register() -> None:
    """Makes `torch.distributed.init_process_group("mpi")` work, with rank and size from MPI; a torch that was built with MPI is left alone.

    Raises:
        ConfigError: there is no mpi4py, or this version of torch is not known.
    """
    if dist.is_mpi_available():  # torch's own, or this
        return
    if (reason := why_not_here()) is not None:
        raise ConfigError(f"backend mpi is not available: {reason}")
    take_charge()
    if (problem := provide_mpi(_make_group)) is not None:
        raise ConfigError(f"backend mpi is not available: {problem}; use backend gloo, or another version of either")


def _make_group(ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
    """The group of the world ranks `ranks`; of all if there are none."""
    from hora.comm.backends.mpi.group import MpiGroup

    mpi = library()
    mpi.look_around(timeout.total_seconds())
    return MpiGroup(mpi, ranks or range(mpi.size), timeout)
