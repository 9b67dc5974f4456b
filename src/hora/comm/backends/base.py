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
    one_host = False
    """Whether it serves the ranks of one host only."""

    @abstractmethod
    def unavailable_because(self, world_size: int) -> str | None:
        """Why the backend cannot be used here for `world_size` ranks, or None when it can."""

    def environment(self, interface: str) -> Mapping[str, str]:  # noqa: ARG002 (for backends with sockets)
        """Variables that bind the backend's own sockets to the network interface `interface`."""
        return {}

    def environment_on_shared_gpu(self, turn: int) -> Mapping[str, str]:  # noqa: ARG002 (for backends of GPUs)
        """Variables with which a rank may work on a GPU where `turn` others do so before it."""
        return {}

    def stand_in(self) -> "Backend | None":
        """Who serves the ranks when they turn out to be of several hosts, or cannot share what the backend shares; None: nobody."""
        return None

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

    def group_of_hosts(self, timeout_s: float, *, one_host: bool) -> dist.ProcessGroup | None:  # noqa: ARG002 (for backends of GPUs)
        """The group in which the hosts of all ranks talk, with tensors on the CPU; None where there is nobody to talk to.

        Collective: all ranks call it after `start_group`, with one `one_host`: whether the ranks may share memory.
        """
        return dist.group.WORLD

    def end_group(self) -> None:
        """Ends what `start_group` and `group_of_hosts` made."""
        if dist.is_initialized():  # the script may have done so itself
            dist.destroy_process_group()
