import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hora.data.loader import DataLoader
from hora.errors import CheckpointMismatch, ConfigError

ONE = {"rank": 0, "world_size": 1}
DATASET = TensorDataset(torch.arange(40))


def samples(step: Any) -> list[int]:
    return [index for (indices,) in step for index in indices.tolist()]


def global_batches(ranks: Sequence[DataLoader]) -> list[list[int]]:
    return [list(itertools.chain(*map(samples, steps))) for steps in zip(*ranks, strict=True)]


class Shuffled(Sampler[int]):
    """Draws from Python's global generator, and knows the epoch."""

    epochs: list[int]

    def __init__(self) -> None:
        self.epochs = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        order = list(range(40))
        random.shuffle(order)
        return iter(order)


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(torch.arange(40.0), 35),
    "random": lambda: RandomSampler(DATASET),
    "random with a generator": lambda: RandomSampler(DATASET, generator=torch.Generator().manual_seed(4)),
    "subset with a generator": lambda: SubsetRandomSampler(range(10, 40), generator=torch.Generator()),
    "own": Shuffled,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_draw_the_same_order_whatever_their_generators_did_before(name: str) -> None:
    ranks = [DataLoader(DATASET, global_batch_size=8, sampler=SAMPLERS[name](), rank=rank, world_size=3) for rank in range(3)]
    epochs = []
    for _ in range(2):
        by_rank = []
        for rank, loader in enumerate(ranks):
            torch.manual_seed(rank)
            random.seed(rank)
            by_rank.append(list(map(samples, loader)))
        epochs.append([list(itertools.chain(*parts)) for parts in zip(*by_rank, strict=True)])
    one = DataLoader(DATASET, global_batch_size=8, sampler=SAMPLERS[name](), **ONE)
    assert epochs == [global_batches([one]) for _ in range(2)]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_restored_run_draws_the_order_of_its_epoch_again(name: str) -> None:
    loader = DataLoader(DATASET, global_batch_size=8, sampler=SAMPLERS[name](), **ONE)
    global_batches([loader])
    expected = global_batches([loader])
    resumed = DataLoader(DATASET, global_batch_size=8, sampler=SAMPLERS[name](), **ONE)
    resumed.load_state_dict({**resumed.state_dict(), "epoch": 1, "step": 2})
    assert global_batches([resumed]) == expected[2:]


class OwnGenerator(Sampler[int]):
    """Draws from a generator that nobody else knows; `drawn` orders came before."""

    def __init__(self, drawn: int) -> None:
        self.random = random.Random(0)
        for _ in range(drawn):
            list(self)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(40), 40))


def test_a_restored_run_whose_sampler_draws_another_order_is_refused_unless_the_epoch_was_over() -> None:
    loader = DataLoader(DATASET, global_batch_size=8, sampler=OwnGenerator(0), **ONE)
    global_batches([loader])
    states, expected = zip(*[(loader.state_dict(), samples(step)) for step in loader], strict=True)

    def resumed(state: dict[str, Any], drawn: int) -> DataLoader:
        loader = DataLoader(DATASET, global_batch_size=8, sampler=OwnGenerator(drawn), **ONE)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        return loader

    assert global_batches([resumed(states[1], drawn=1)]) == list(expected[2:])
    with pytest.raises(CheckpointMismatch, match="draw the order of epoch 1 again .* drew another one; let it draw from"):
        global_batches([resumed(states[1], drawn=0)])
    over = resumed(states[-1], drawn=0)
    assert global_batches([over]) == []
    assert len(global_batches([over])) == 5


def test_a_sampler_keeps_the_state_of_its_generator() -> None:
    generator = torch.Generator().manual_seed(9)
    before = generator.get_state()
    global_batches([DataLoader(DATASET, global_batch_size=8, sampler=RandomSampler(DATASET, generator=generator), **ONE)])
    assert torch.equal(generator.get_state(), before)


def test_a_sampler_learns_the_epoch() -> None:
    sampler = Shuffled()
    loader = DataLoader(DATASET, global_batch_size=8, sampler=sampler, **ONE)
    for _ in range(3):
        global_batches([loader])
    assert sampler.epochs == [0, 1, 2]


def test_a_sampler_may_draw_a_sample_twice_and_leave_others_out() -> None:
    loader = DataLoader(DATASET, global_batch_size=4, sampler=[5, 5, 5, 7, 7, 1], drop_last=True, **ONE)
    assert global_batches([loader]) == [[5, 5, 5, 7]]
    assert len(loader) == 1


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_batch_of_a_batch_sampler_is_a_global_batch(world_size: int) -> None:
    batches = [[3, 1, 4], [15], [9, 2, 6, 5], [35]]
    ranks = [DataLoader(DATASET, batch_sampler=batches, micro_batch_size=2, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert global_batches(ranks) == batches
    assert len(ranks[0]) == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"global_batch_size": 8, "sampler": DistributedSampler(DATASET, 2, 0)},
        {"batch_sampler": BatchSampler(DistributedSampler(DATASET, 2, 0), 8, False)},
    ],
)
def test_a_sampler_for_one_rank_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a DistributedSampler draws those of one, and pads them"):
        DataLoader(DATASET, **settings, **ONE)


def test_a_sampler_without_a_length_is_taken() -> None:
    loader = DataLoader(DATASET, global_batch_size=8, sampler=Shuffled(), **ONE)
    with pytest.raises(TypeError, match="known at the end"):
        len(loader)
    assert len(global_batches([loader])) == 5


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_torch_loader_is_taken_over_with_its_batches(world_size: int, num_workers: int) -> None:
    torch_loader = torch.utils.data.DataLoader(
        DATASET, batch_size=7, drop_last=True, sampler=SequentialSampler(DATASET), num_workers=num_workers
    )
    ranks = [DataLoader.from_loader(torch_loader, micro_batch_size=2, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert global_batches(ranks) == [batch[0].tolist() for batch in torch_loader]


def test_a_torch_loader_keeps_its_collate_function() -> None:
    torch_loader = torch.utils.data.DataLoader(list(range(6)), batch_size=4, collate_fn=tuple)
    loader = DataLoader.from_loader(torch_loader, micro_batch_size=3, **ONE)
    assert [micro_batch for step in loader for micro_batch in step] == [(0, 1, 2), (3,), (4, 5)]


def test_indices_from_the_end_are_taken_as_torch_takes_them() -> None:
    dataset = TensorDataset(torch.arange(5))
    loader = DataLoader(dataset, batch_sampler=[[-1, 0]], **ONE)
    assert [batch[0].tolist() for step in loader for batch in step] == [[4, 0]]
