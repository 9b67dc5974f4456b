import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from hora.comm.randomness import RandomNumbers
from hora.data.loader import DataLoader

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(1, dtype=torch.float64).item(),
    "random": random.random,
    "numpy": lambda: float(np.random.rand()),
    "numpy, normal": lambda: float(np.random.randn()),
}


class Augmented(Dataset[Tensor]):
    """Samples (index, a random number); only those from `since` on draw one."""

    def __init__(self, draw: str, since: int = 0):
        self.draw, self.since = draw, since

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, DRAWS[self.draw]() if index >= self.since else 0.0], dtype=torch.float64)


def epoch_of(dataset: Any, world_size: int = 1, **settings: Any) -> dict[int, float]:
    """The random number of each sample over all ranks, in one epoch."""
    found: dict[int, float] = {}
    for rank in range(world_size):
        for step in DataLoader(dataset, global_batch_size=10, rank=rank, world_size=world_size, **settings):
            for index, number in itertools.chain(*(micro_batch.tolist() for micro_batch in step)):
                assert index not in found
                found[int(index)] = number
    return found


@pytest.mark.parametrize("draw", DRAWS)
def test_a_sample_is_the_same_for_any_number_of_ranks_and_micro_batches(draw: str) -> None:
    expected = epoch_of(Augmented(draw))
    assert len(set(expected.values())) == 30
    for world_size, micro_batch_size in ((2, None), (3, 2), (1, 1), (4, 3)):
        assert epoch_of(Augmented(draw), world_size, micro_batch_size=micro_batch_size) == expected
    assert epoch_of(Subset(Augmented(draw), range(30))) == expected


@pytest.mark.parametrize("draw", DRAWS)
def test_a_sample_is_the_same_for_any_number_of_workers(draw: str) -> None:
    expected = epoch_of(Augmented(draw), micro_batch_size=4)
    assert epoch_of(Augmented(draw), micro_batch_size=4, num_workers=1) == expected
    assert epoch_of(Augmented(draw), micro_batch_size=4, num_workers=2) == expected


def test_augmentation_differs_by_epoch_and_seed() -> None:
    loader = DataLoader(Augmented("torch"), global_batch_size=30, rank=0, world_size=1)
    epochs = [dict(next(iter(step)).tolist()) for _ in range(2) for step in loader]
    assert all(epochs[0][index] != epochs[1][index] for index in range(30))
    assert epoch_of(Augmented("torch"), seed=1) != epoch_of(Augmented("torch"), seed=0)


@pytest.mark.parametrize("draw", DRAWS)
def test_a_data_set_that_draws_for_some_samples_only_is_noticed(draw: str) -> None:
    expected = epoch_of(Augmented(draw))
    found = epoch_of(Augmented(draw, since=17), 2, micro_batch_size=5)
    assert found == {index: expected[index] if index >= 17 else 0.0 for index in range(30)}


class Masking:
    """A collate function that draws one random number for its micro-batch."""

    def __call__(self, samples: list[int]) -> tuple[list[int], float]:
        return samples, random.random() + torch.rand(1).item()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_collating_draws_other_numbers_for_each_micro_batch(num_workers: int) -> None:
    def drawn(rank: int, workers: int) -> list[float]:
        loader = DataLoader(
            list(range(40)), global_batch_size=8, micro_batch_size=2, collate_fn=Masking(), num_workers=workers, rank=rank, world_size=2
        )
        return [number for _ in range(2) for step in loader for _samples, number in step]

    numbers = drawn(0, num_workers) + drawn(1, num_workers)
    assert len(set(numbers)) == len(numbers) == 40
    assert drawn(0, num_workers) == drawn(0, 0)


class Perhaps(Augmented):
    """Plain numbers of samples of which only the last few draw."""

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        super().__getitem__(index)
        return index


def test_collating_draws_the_same_whether_or_not_samples_before_it_drew() -> None:
    def drawn(num_workers: int) -> list[float]:
        loader = DataLoader(
            Perhaps("torch", since=20),
            global_batch_size=6,
            collate_fn=Masking(),
            num_workers=num_workers,
            shuffle=False,
            rank=0,
            world_size=1,
        )
        return [number for _ in range(2) for step in loader for _samples, number in step]

    assert drawn(0) == drawn(1) == drawn(2)


class Bulk(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


def test_loading_many_at_once_draws_other_numbers_for_each_micro_batch() -> None:
    loader = DataLoader(Bulk("numpy"), global_batch_size=10, micro_batch_size=5, rank=0, world_size=1)
    numbers = [number for _ in range(2) for step in loader for micro_batch in step for _index, number in micro_batch.tolist()]
    assert len(set(numbers)) == len(numbers) == 60


def states() -> tuple[Any, ...]:
    numpy_state = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist(), numpy_state[2:]  # type: ignore[union-attr]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loading_leaves_the_generators_of_the_model_alone(num_workers: int) -> None:
    np.random.randn()  # leaves half of a pair of normal numbers behind
    before = states()
    for draw in DRAWS:
        epoch_of(Augmented(draw), num_workers=num_workers)
    assert states() == before


def test_generators_are_put_back_after_an_error() -> None:
    before, numbers = states(), RandomNumbers(1)
    with pytest.raises(ZeroDivisionError), numbers.in_force():
        random.random()
        raise ZeroDivisionError
    assert states() == before


def test_random_numbers_go_on_where_they_were_left() -> None:
    def draw_all() -> list[float]:
        return [draw() for draw in DRAWS.values()]

    whole, parts = RandomNumbers(5), RandomNumbers(5)
    with whole.in_force():
        expected = [draw_all() for _ in range(3)]
    found = []
    for _ in range(3):
        with parts.in_force():
            found.append(draw_all())
        draw_all()
    assert found == expected
