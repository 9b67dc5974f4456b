"""The groups in which the ranks of one session talk: all of them, and by node.

The smaller groups cost connections, so they are made when an algorithm first asks for them: by all ranks, all groups, in one order, as
torch.distributed wants it.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hora import log
from hora.comm.backends.shm import Shm, register
from hora.comm.backends.shm.segment import CannotShare
from hora.comm.peer_memory import PeerMemory, Pulling, share, share_tensors
from hora.errors import ConfigError
from hora.plan.algorithm_table import Table
from hora.plan.nodes import Nodes

_NOTHING_MEASURED = Table()
_LAST_KERNEL_S = 5.0
_LOST: list[PeerMemory | Pulling] = []


@dataclass(frozen=True)
class ByNode:
    """A rank's groups by node.

    Attributes:
        inside: the ranks of its node.
        across: where nodes are `even`, the ranks of its place on each node; else the first rank of each node, and None for the others.
        even: whether all nodes have equally many ranks.
        in_memory: whether `inside` shares memory, so that its own collectives are better than messages.
    """

    inside: dist.ProcessGroup
    across: dist.ProcessGroup | None
    even: bool
    in_memory: bool


class Groups:
    """The groups of one session, which closes them.

    Args:
        world: all ranks.
        nodes: which of them stand on which node.
        timeout_s: deadline of collectives in the groups made here.
        table: what algorithm "auto" is for which tensors, the same on all ranks.

    Attributes:
        choices: what it came to for the sizes and devices seen so far.
    """

    def __init__(self, world: dist.ProcessGroup, nodes: Nodes, timeout_s: float, table: Table = _NOTHING_MEASURED) -> None:
        self.world = world
        self.nodes = nodes
        self.table = table
        self.choices: dict[tuple[int, str], str] = {}
        self._timeout = timedelta(seconds=timeout_s)
        self._by_node: ByNode | None = None
        self._peer_memory: PeerMemory | None = None
        self._asked_for_memory = False
        self._pulled: weakref.WeakSet[Pulling] = weakref.WeakSet()

    def by_node(self) -> ByNode:
        """The groups by node, for nodes that are not `flat`.

        Collective: all ranks call it; the first call makes the groups.
        """
        if self._by_node is None:
            backend = dist.get_backend(self.world)
            shared = self._make_in_memory(backend)
            inside = shared or self._make(self.nodes.ranks, backend)
            assert inside is not None
            self._by_node = ByNode(inside, self._make(self.nodes.counterparts, backend), self.nodes.even, shared is not None)
        return self._by_node

    def peer_memory(self, device: torch.device) -> PeerMemory | None:
        """Memory that the GPUs of the group share; None where they share none.

        Collective: all ranks call it; the first call maps the memory.

        Raises:
            ConfigError: it is the first call, and a graph is being captured.
        """
        if device.type != "cuda" or self._asked_for_memory:
            return self._peer_memory if device.type == "cuda" else None
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError("memory cannot be mapped while a CUDA graph is captured: run the step once before")
        self._peer_memory, self._asked_for_memory = share(self.world, device, self._timeout.total_seconds()), True
        return self._peer_memory

    def pulling(self, device: torch.device, numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> Pulling | None:
        """Tensors in memory that the GPUs of the group share, and their sums; None where they share none.

        Collective: all ranks call it, with the same lengths and types; never while a CUDA graph is captured.
        """
        memory = self.peer_memory(device)
        if memory is None:
            return None
        made = share_tensors(self.world, device, self._timeout.total_seconds(), memory.fault, numels, dtypes)
        if made is not None:
            self._pulled.add(made)
        return made

    def _close_peer_memory(self) -> None:
        """Lets go of shared memory. Where a kernel has waited in vain, or something does not end, it is kept: torch waits for the GPU to free it, and
        ends the process if it cannot.
        """
        memory, self._peer_memory = self._peer_memory, None
        if memory is None:
            return
        ended = memory.has_ended(_LAST_KERNEL_S)
        if memory.overdue is not None:
            log.get_logger().error(
                "a sum on the GPU timed out: rank %d did not take part within %g s; an error of CUDA that comes after it is of no account",
                dist.get_global_rank(self.world, memory.overdue),
                self._timeout.total_seconds(),
            )
        if not ended or memory.overdue is not None:
            _LOST.extend([memory, *self._pulled])

    def _make_in_memory(self, backend: str) -> dist.ProcessGroup | None:
        """The group inside this rank's node in shared memory, if every node can have one."""
        if backend != "gloo" or Shm().unavailable_because(self.world.size()) is not None:
            return None
        register()
        mine: dist.ProcessGroup | None = None
        try:
            mine = self._make(self.nodes.ranks, Shm.name)
        except CannotShare as error:
            log.get_logger().debug("%s", error)
        # All ranks make the same groups next, whatever became of those of one node.
        able = torch.tensor([float(mine is not None)], device="cpu")
        dist.all_reduce(able, dist.ReduceOp.MIN, group=self.world)
        if not able.item() and mine is not None:
            dist.destroy_process_group(mine)
        return mine if able.item() else None

    def _make(self, all_ranks: Sequence[Sequence[int]], backend: str) -> dist.ProcessGroup | None:
        """Makes a group of each of `all_ranks`, which have no rank in common; the one that this rank is in."""
        mine: dist.ProcessGroup | None = None
        for ranks in all_ranks:
            group = dist.new_group(list(ranks), backend=backend, timeout=self._timeout)
            if self.world.rank() in ranks:
                mine = group
        return mine

    def close(self) -> None:
        """Ends the groups made here and lets go of all."""
        self._close_peer_memory()
        made, self._by_node = self._by_node, None
        del self.world
        if made is not None and dist.is_initialized():
            for group in (made.across, made.inside):
                if group is not None:
                    dist.destroy_process_group(group)
