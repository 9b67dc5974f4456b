"""Sums that ranks fetch of each other: the parts of all ranks together, in the order of the tree, on CPUs, where no copy is under way meanwhile."""

from unittest import mock

import pytest
import torch

from hora import env
from hora.comm.peer_memory import sharing
from hora.comm.peer_memory.pulling import PULLED_DTYPES, Layout, Pulling
from hora.plan.logical import LogicalRanks


@pytest.mark.parametrize("world", range(2, 9))
@pytest.mark.parametrize("dtype", sorted(PULLED_DTYPES, key=str))
@pytest.mark.parametrize("weight", [1.0, 257.0])
def test_parts_of_all_ranks_make_the_mean(world, dtype, weight):
    numels = [1, 63, 64, 65, 1000, 4096, 100_003]
    layout = Layout(numels, [dtype] * len(numels), world)
    memory = [torch.zeros(layout.size_bytes, dtype=torch.uint8) for _ in range(world)]
    ranks = [Pulling(memory, layout, r, 1.0, torch.zeros((), dtype=torch.int32)) for r in range(world)]
    divisor = torch.tensor(weight, dtype=torch.float64)
    for index, numel in enumerate(numels):
        parts = [(torch.randn(numel) * 100).to(dtype) for _ in range(world)]
        for part, rank in zip(parts, ranks, strict=True):
            rank.tensors[index].copy_(part)
        total = LogicalRanks(world, world).total([(range(i, i + 1), part.clone()) for i, part in enumerate(parts)], torch.add)
        for rank in ranks:
            rank.fetch_parts(index)
        for rank in ranks:
            rank.add_parts(index, divisor)
        for rank in ranks:
            rank.gather_parts(index)
        for rank in ranks:
            assert torch.equal(rank.tensors[index], mean(total, weight)), numel
    assert all(not share[: 3 * world * 8].any() for share in memory), "flags are no part of a tensor"


def mean(total: torch.Tensor, weight: float) -> torch.Tensor:
    """Rounded once, from the sum."""
    wide = total.float() if total.dtype is torch.bfloat16 else total
    return (wide / weight).to(total.dtype)


@pytest.mark.parametrize(
    ("world_size", "capability", "environ", "wanted"),
    [
        (2, (9, 0), {}, True),
        (3, (9, 0), {}, False),
        (3, (9, 0), {"NCCL_NVLS_ENABLE": "0"}, True),
        (3, (9, 0), {"NCCL_NVLS_ENABLE": "1"}, False),
        (8, (8, 0), {}, True),
        (2, (9, 0), {env.COPY_ENGINES: "0"}, False),
        (3, (9, 0), {env.COPY_ENGINES: "1", "NCCL_NVLS_ENABLE": "0"}, True),
    ],
)
def test_copy_engines_are_left_out_where_nccl_may_be_faster_or_the_user_says_so(monkeypatch, world_size, capability, environ, wanted):
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        assert (sharing._unwanted_because(torch.device("cuda", 0), world_size) is None) == wanted


class Stages:
    """The stages in which ranks come to share tensors, of which one fails here, or on another rank."""

    def __init__(self, monkeypatch, here: str | None = None, elsewhere: int | None = None) -> None:
        self.done: list[str] = []
        self.problems: list[str | None] = []
        self._here, self._elsewhere = here, elsewhere
        for name in ("_try_pulling", "allocate_for_peers", "map_to_peers"):
            monkeypatch.setattr(sharing, name, lambda *_, stage=name: self._reach(stage))
        monkeypatch.setattr(sharing, "Pulling", lambda *_: mock.Mock(adds_up=lambda: self._reach("adds_up")))
        monkeypatch.setattr(sharing, "_unwanted_because", lambda *_: None)
        monkeypatch.setattr(sharing, "_agree", self._agree)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
        group = mock.Mock(size=lambda: 2, rank=lambda: 0)
        fault = torch.zeros((), dtype=torch.int32)
        self.made = sharing.share_tensors(group, torch.device("cuda", 0), 1.0, fault, [64], [torch.float32])

    def _reach(self, stage: str) -> bool:
        self.done.append(stage)
        if stage == self._here == "adds_up":
            return False
        if stage == self._here:
            raise RuntimeError(f"{stage} fails")
        return True

    def _agree(self, problem, *_):
        self.problems.append(problem)
        return None if problem is not None or len(self.problems) == self._elsewhere else (1, [0, 1])


def test_tensors_are_shared_when_all_stages_succeed_on_all_ranks(monkeypatch):
    stages = Stages(monkeypatch)
    assert stages.made is not None
    assert stages.done == ["_try_pulling", "allocate_for_peers", "map_to_peers", "adds_up"]
    assert stages.problems == [None] * 3


@pytest.mark.parametrize(("stage", "agreements"), [("_try_pulling", 1), ("allocate_for_peers", 1), ("map_to_peers", 2), ("adds_up", 3)])
def test_a_stage_that_fails_here_is_told_to_all_and_ends_it(monkeypatch, stage, agreements):
    stages = Stages(monkeypatch, here=stage)
    assert stages.made is None
    assert stages.done[-1] == stage
    assert [problem is None for problem in stages.problems] == [True] * (agreements - 1) + [False]


@pytest.mark.parametrize(("agreement", "last"), [(1, "allocate_for_peers"), (2, "map_to_peers"), (3, "adds_up")])
def test_a_stage_that_fails_on_another_rank_ends_it_here_too(monkeypatch, agreement, last):
    stages = Stages(monkeypatch, elsewhere=agreement)
    assert (stages.made, stages.done[-1], len(stages.problems)) == (None, last, agreement)
