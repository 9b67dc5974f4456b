"""What is timed: an all-reduce whose every result is looked at, and a copy of the bytes that it must move.

A sample is the mean time of a call in microseconds on this rank, of several calls where they are short, all ranks beginning together.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Final

import torch
from torch import Tensor

from hora.comm.algorithms import Algorithm
from hora.comm.groups import Groups
from hora.comm.reduce_op import ReduceOp
from hora.diag.wire.teams import Team

_MOST_CALLS: Final = 20
_BYTES_PER_SAMPLE: Final = {"cpu": 4 << 20, "cuda": 1 << 30}
_PERIOD: Final = 1021
"""Values are whole numbers up to this, times the number of a rank, so that float32 holds the sums of up to 180 ranks exactly."""


def calls_in_a_sample(size: int, device_type: str) -> int:
    """Several for small tensors, whose time would be lost in that of the clock and the barrier."""
    return max(1, min(_MOST_CALLS, _BYTES_PER_SAMPLE[device_type] // size))


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside the `with` block torch's operations use one thread a rank: the others would still be turning when the next sample begins."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def bytes_moved(size: int, ranks: int) -> int:
    """What each rank must send, and receive, for an all-reduce of `size` bytes: 2(n - 1)/n of them."""
    return 2 * (ranks - 1) * size // ranks


@dataclass
class Reduction:
    """All-reduces of float32 numbers that differ between places, calls and ranks.

    Attributes:
        pattern: `[calls, numel]`; rank r begins with r + 1 times this.
        data: of the same shape, for what is reduced.
        wrong: what was wrong first; nothing while all sums were right.
        graphs: those that were captured, until `release_graphs`.
    """

    team: Team
    pattern: Tensor
    data: Tensor
    wrong: str = field(default="")
    graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list)

    @classmethod
    def of(cls, size: int, device: torch.device, team: Team) -> "Reduction":
        """For tensors of `size` bytes."""
        calls, numel = calls_in_a_sample(size, device.type), size // 4
        pattern = torch.arange(calls * numel, dtype=torch.int32, device=device).remainder_(_PERIOD).add_(1).float().view(calls, numel)
        return cls(team, pattern, torch.empty_like(pattern))

    def sampler(self, name: str, algorithm: Algorithm, groups: Groups, *, in_graph: bool = False) -> Callable[[], float]:
        """Takes a sample of `algorithm` and looks at all its results; `in_graph`: of the replay of a CUDA graph of all its calls."""

        def reduce_all() -> None:
            for tensor in self.data:
                algorithm.all_reduce(tensor, ReduceOp.SUM, groups, async_op=False)

        @cache
        def act() -> Callable[[], None]:
            if not in_graph:
                return reduce_all
            self.graphs.append(_captured(reduce_all))
            return self.graphs[-1].replay

        def sample() -> float:
            act()
            torch.mul(self.pattern, self.team.rank + 1, out=self.data)
            elapsed_us = _timed(act(), self.data.device, self.team)
            self._check(name)
            return elapsed_us / len(self.data)

        return sample

    def release_graphs(self) -> None:
        """Gives them back: NCCL does not end while one holds its calls."""
        for graph in self.graphs:
            graph.reset()
        self.graphs.clear()

    def _check(self, name: str) -> None:
        total = self.team.size * (self.team.size + 1) // 2
        self.data.div_(total)  # exact, if the sum was right
        if not self.wrong and not torch.equal(self.data, self.pattern):
            call, place = (self.data != self.pattern).nonzero()[0].tolist()
            found, expected = (tensor[call, place].item() * total for tensor in (self.data, self.pattern))
            self.wrong = f"{name}: element {place} of call {call} is {found:g} on rank {self.team.rank}, but the sum is {expected:g}"


@dataclass(frozen=True)
class Copying:
    """Copies as many bytes as an all-reduce must move; `what` says of what kind."""

    what: str
    team: Team
    source: Tensor
    target: Tensor
    calls: int

    @classmethod
    def of(cls, size: int, device: torch.device, team: Team) -> "Copying":
        """For an all-reduce of `size` bytes: from the memory of the next GPU if it is visible, else on the rank's own device."""
        what, origin = "memory copy, one thread a rank", device
        if device.type == "cuda":
            following = torch.device("cuda", ((device.index or 0) + 1) % torch.cuda.device_count())
            peer = following != device and torch.cuda.can_device_access_peer(device, following)
            what, origin = ("peer copy from the next GPU", following) if peer else ("copy on the GPU itself", device)
        # Not zeros: pages of which nothing was ever written are all one page, and stay in the cache.
        source = torch.ones(bytes_moved(size, team.size), dtype=torch.uint8, device=origin)
        return cls(what, team, source, torch.zeros_like(source, device=device), calls_in_a_sample(size, device.type))

    def sample(self) -> float:
        """Takes a sample."""

        def copy_all() -> None:
            for _ in range(self.calls):
                self.target.copy_(self.source, non_blocking=True)

        return _timed(copy_all, self.target.device, self.team) / self.calls


def _captured(act: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """`act` as a CUDA graph; once it is carried out before, as torch wants it."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        act()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        act()
    return graph


def _timed(act: Callable[[], None], device: torch.device, team: Team) -> float:
    """Microseconds that `act` takes here; on a GPU those between two events around it."""
    if device.type != "cuda":
        team.begin_together()
        begin = time.perf_counter()
        act()
        return (time.perf_counter() - begin) * 1e6
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    team.begin_together()
    before.record()
    act()
    after.record()
    torch.cuda.synchronize(device)
    return float(before.elapsed_time(after)) * 1e3
