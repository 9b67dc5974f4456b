"""What a backend is to Hora: a name, the kind of device it serves, and how torch's default group is made with it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

# Its functions have the default group as a default argument: loaded while there is one (torch.compile does), they would keep it, and with it the
# connections to the other ranks, until the process ends.
import torch.distributed.nn.functional

from hora.comm.torch_private import Store


class Backend(ABC):
    """Moves the bytes of collectives between ranks. Stateless: one object of each class serves all sessions."""

    name: str
    device_types: tuple[str, ...]

    @abstractmethod
    def unavailable_because(self, world_size: int) -> str | None:
        """Why the backend cannot be used here for `world_size` ranks, or None when it can."""

    def environment(self, interface: str) -> Mapping[str, str]:  # noqa: ARG002 (for backends with sockets)
        """Variables that bind the backend's own sockets to the network interface `interface`."""
        return {}

    def start_group(
        self,
        store: Store,
        rank: int,
        world_size: int,
        device: torch.device,  # noqa: ARG002 (for backends bound to one)
        timeout_s: float,
    ) -> None:
        """Makes torch.distributed's default group.

        Collective: all ranks call it.
        """
        dist.init_process_group(self.name, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))

    def group_of_hosts(self, timeout_s: float) -> dist.ProcessGroup | None:
        """The group in which the hosts of all ranks talk, with tensors on the CPU; None where there is nobody to talk to.

        Collective: all ranks call it after `start_group`.
        """
        if "cpu" in self.device_types:
            return dist.group.WORLD
        hosts: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return hosts

    def end_group(self) -> None:
        """Ends what `start_group` and `group_of_hosts` made."""
        dist.destroy_process_group()
