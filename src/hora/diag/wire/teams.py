"""The first n ranks of a job as a team, for each n that is measured: their groups by backend, and one for what they tell each other."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hora.comm.algorithms import algorithm_table
from hora.comm.backends import register_backends
from hora.comm.groups import Groups
from hora.comm.session import Session
from hora.plan.nodes import Nodes

_TIMEOUT = timedelta(minutes=30)  # ranks whose turn it is not wait for others to measure


@dataclass(frozen=True)
class Team:
    """The first `size` ranks, of whom this one may be.

    Attributes:
        rank: this one.
        gpu: its device, where it has one.
        control: between the hosts: in shared memory where the session is, so that all begin within microseconds, else over Gloo.
        groups: by backend.
    """

    rank: int
    size: int
    gpu: torch.device
    nodes: Nodes
    control: Any
    groups: dict[str, Groups]

    def begin_together(self) -> None:
        """Returns when all of the team have called it."""
        dist.barrier(group=self.control)

    def tell_all(self, mine: Any) -> list[Any]:
        """What each of the team says, as JSON has it, by rank."""
        said = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(said)]), group=self.control)
        longest = max(int(size) for size in sizes)
        told = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(told, torch.nn.functional.pad(said, (0, longest - len(said))), group=self.control)
        return [json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(told, sizes, strict=True)]


@contextmanager
def teams(sizes: Sequence[int], backends: Sequence[str], here: Session) -> Iterator[dict[int, Team]]:
    """Makes the teams by size, and ends their groups with the block.

    Collective: all ranks of the session call it.
    """
    register_backends()
    made = {size: _make_team(size, backends, here) for size in sizes}
    try:
        yield made
    finally:
        for team in made.values():
            _end(team, member=here.rank < team.size)


def _make_team(size: int, backends: Sequence[str], here: Session) -> Team:
    ranks, table = list(range(size)), algorithm_table(here.records[0].algorithms)
    nodes = Nodes.of([record.node_rank for record in here.records[:size]])
    groups = {
        backend: Groups(dist.new_group(ranks, backend=backend, timeout=_TIMEOUT), nodes, _TIMEOUT.total_seconds(), table)
        for backend in backends
    }
    control = dist.new_group(ranks, backend="shm" if here.backend == "shm" else "gloo", timeout=_TIMEOUT)
    return Team(here.rank, size, here.device, nodes, control, groups)


def _end(team: Team, *, member: bool) -> None:
    worlds = [groups.world for groups in team.groups.values()]
    for groups in team.groups.values():
        groups.close()
    if member:
        for group in (*worlds, team.control):
            dist.destroy_process_group(group)
