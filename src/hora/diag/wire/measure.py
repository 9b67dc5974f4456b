"""What the ranks do: the variants of an all-reduce in turns, beside a plain copy of as many bytes.

The ranks of a point are the first ones of the job; the others wait meanwhile. Of each sample the slowest rank's time counts. What is measured is the
algorithm on the group of a backend: `hora.all_reduce` has all ranks agree on the call before that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from hora.comm.algorithms import Algorithm, find_algorithm
from hora.comm.session import Session
from hora.diag.bench.registry import Workload
from hora.diag.wire.request import GRAPH, SYMMETRIC, Request, say_size
from hora.diag.wire.teams import Team, teams
from hora.diag.wire.work import Copying, Reduction, one_thread
from hora.errors import HoraError

LIMIT: Final = "limit"
"""Name of the copy among the variants."""


class WrongSum(HoraError):
    """An all-reduce gave a result that is not the sum."""


@dataclass(frozen=True)
class Point:
    """What was measured of one size on one number of ranks.

    Attributes:
        limit: what the copy was, for people.
        samples: microseconds of a call by variant, `backend/algorithm`, `backend/algorithm/graph` or `limit`.
    """

    size: int
    ranks: int
    nodes: int
    interleaved: bool
    device: str
    limit: str
    samples: dict[str, list[float]]


def measure(request: Request, here: Session, on_point: Callable[[Point], None], find: Callable[[str], Algorithm] = find_algorithm) -> None:
    """Measures every point, and tells it on the ranks that had part in it.

    Collective: all ranks of the session call it.

    Args:
        request: what to measure.
        here: the session, with a GPU for each rank if backend nccl is asked for.
        on_point: is given each point as soon as it is measured.
        find: the algorithms by name.

    Raises:
        WrongSum: on all ranks that had part in the point; names the variant. The others are not told.
    """
    with one_thread(), teams(request.ranks, request.backends, here) as by_size:
        for size, ranks, device in request.points:
            if here.rank < ranks:
                on_point(_measure_point(request, size, device, by_size[ranks], here.world_size, find))


def _measure_point(request: Request, size: int, device_type: str, team: Team, world_size: int, find: Callable[[str], Algorithm]) -> Point:
    device = team.gpu if device_type == "cuda" else torch.device("cpu")
    reduction, copying = Reduction.of(size, device, team), Copying.of(size, device, team)
    workload = Workload("allreduce", "", "us", team.size, {LIMIT: copying.sample})
    for backend, name, in_graph in request.variants(team.size, device_type, world_size):
        if name == SYMMETRIC and team.groups[backend].peer_memory(device) is None:
            continue  # it would be `native` under another name
        variant = f"{backend}/{name}{f'/{GRAPH}' if in_graph else ''}"
        workload.variant(variant)(reduction.sampler(variant, find(name), team.groups[backend], in_graph=in_graph))
    try:
        mine = {measured.variant: measured.samples for measured in workload.measure(request.rounds)}
    finally:
        reduction.release_graphs()
    by_rank, wrong = zip(*team.tell_all((mine, reduction.wrong)), strict=True)
    if any(wrong):
        raise WrongSum(f"wrong sum of {say_size(size)} on {team.size} ranks with {next(filter(None, wrong))}")
    slowest = {name: [max(samples) for samples in zip(*(told[name] for told in by_rank), strict=True)] for name in mine}
    nodes = team.nodes
    return Point(size, team.size, len(nodes.ranks), nodes.interleaved, device_type, copying.what, slowest)
