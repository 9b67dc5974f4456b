import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from hora import events
from hora.data.loader import DataLoader
from hora.errors import CheckpointMismatch, ConfigError

ONE = {"rank": 0, "world_size": 1}


class Stream(IterableDataset[Tensor]):
    """`length` samples with a random number each, in an order that epochs change; shared out over workers as torch's documentation shows."""

    def __init__(self, length: int):
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        for index in range(info.id if info else 0, self.length, info.num_workers if info else 1):
            yield torch.tensor([index + 1000 * self.epoch, random.random() + torch.rand(1).item()])


def steps(loader: DataLoader) -> list[list[list[float]]]:
    return [[sample for micro_batch in step for sample in micro_batch.tolist()] for step in loader]


def global_batches(world_size: int, length: int, epochs: int = 1, **settings: Any) -> list[list[list[float]]]:
    ranks = [DataLoader(Stream(length), rank=rank, world_size=world_size, **settings) for rank in range(world_size)]
    by_rank = [[step for _ in range(epochs) for step in steps(loader)] for loader in ranks]
    return [list(itertools.chain(*parts)) for parts in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_global_batches_of_a_stream_are_the_same_for_any_number_of_ranks(world_size: int, num_workers: int) -> None:
    found = global_batches(world_size, 25, epochs=2, global_batch_size=10, micro_batch_size=3, num_workers=num_workers)
    assert [[index for index, _number in batch] for batch in found[:3]] == [list(range(10)), list(range(10, 20)), list(range(20, 25))]
    assert [len(batch) for batch in found] == [10, 10, 5, 10, 10, 5]
    assert found == global_batches(1, 25, epochs=2, global_batch_size=10)
    assert len({number for batch in found for _index, number in batch}) == 50


def test_a_rank_without_samples_at_the_ragged_end_has_an_empty_step() -> None:
    loader = DataLoader(Stream(9), global_batch_size=8, micro_batch_size=1, rank=1, world_size=2)
    assert [[len(micro_batch) for micro_batch in step] for step in loader] == [[1, 1, 1, 1], []]


def test_the_ragged_end_of_a_stream_can_be_dropped() -> None:
    assert [len(batch) for batch in global_batches(2, 25, global_batch_size=10, drop_last=True)] == [10, 10]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_a_restored_stream_goes_on_with_the_very_next_step(done: int, num_workers: int) -> None:
    expected = steps(DataLoader(Stream(25), global_batch_size=10, **ONE))
    loader = DataLoader(Stream(25), global_batch_size=10, num_workers=num_workers, **ONE)
    loader.load_state_dict({**loader.state_dict(), "step": done})
    assert steps(loader) == expected[done:]


@pytest.mark.parametrize(("length", "drop_last", "warned"), [(0, False, True), (9, True, True), (9, False, False)])
def test_an_epoch_without_a_step_is_warned_of(length: int, drop_last: bool, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Stream(length), global_batch_size=10, drop_last=drop_last, **ONE)
    with caplog.at_level(logging.WARNING, logger="hora"):
        assert len(steps(loader)) == (0 if warned else 1)
        loader.load_state_dict({**loader.state_dict(), "epoch": 3, "step": 1})
        assert steps(loader) == []  # the end of an epoch that was left after its last step
    expected = ["the data set gave no global batch in epoch 0, so that the epoch has no step"] if warned else []
    assert [record.message for record in caplog.records] == expected


def test_a_stream_read_here_leaves_the_models_random_numbers_alone() -> None:
    torch.manual_seed(0)
    random.seed(0)
    expected = torch.rand(3).tolist(), random.random()
    torch.manual_seed(0)
    random.seed(0)
    loader = DataLoader(Stream(100), global_batch_size=10, **ONE)
    numbers = [torch.rand(1).item() for _step in itertools.islice(loader, 3)]
    assert (numbers, random.random()) == expected


class Heard(events.Observer):
    def __init__(self) -> None:
        self.indices: list[int] = []

    def on_samples(self, *, epoch: int, step: int, micro_step: int, indices: Any) -> None:
        self.indices += indices


def test_an_observer_hears_places_in_the_stream() -> None:
    with events.observe(Heard()) as heard:
        steps(DataLoader(Stream(25), global_batch_size=10, micro_batch_size=3, rank=1, world_size=2))
    assert heard.indices == [5, 6, 7, 8, 9, 15, 16, 17, 18, 19, 23, 24]


def noisy(samples: list[Tensor]) -> tuple[int, float]:
    return len(samples), random.random() + torch.rand(1).item()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_collating_a_stream_draws_other_but_repeatable_numbers_for_each_micro_batch(num_workers: int) -> None:
    def drawn(rank: int, seed: int, workers: int) -> list[float]:
        torch.manual_seed(seed)
        loader = DataLoader(
            Stream(40), global_batch_size=8, micro_batch_size=2, collate_fn=noisy, num_workers=workers, rank=rank, world_size=2
        )
        return [number for _ in range(2) for step in loader for _length, number in step]

    numbers = drawn(0, 1, num_workers) + drawn(1, 1, num_workers)
    assert len(set(numbers)) == len(numbers) == 40
    assert drawn(0, 2, 0) == numbers[:20]


def test_the_length_of_a_stream_is_not_known() -> None:
    with pytest.raises(TypeError, match="known at the end of an epoch only"):
        len(DataLoader(Stream(25), global_batch_size=10, **ONE))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": 2}, "num_workers must be 0 or 1 for a data set without an index, but is 2"),
        ({"num_workers": 1, "persistent_workers": True}, "persistent_workers must be off"),
        ({"shuffle": True}, "comes in its own order: it does not go with shuffle=True, sampler or batch_sampler"),
        ({"sampler": [1]}, "comes in its own order"),
    ],
)
def test_what_streams_cannot_do_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataLoader(Stream(25), global_batch_size=10, **settings, **ONE)


class Exhausted(IterableDataset[int]):
    """Hands out one iterator again and again, of which the second epoch finds nothing."""

    def __init__(self) -> None:
        self.numbers = iter(range(25))

    def __iter__(self) -> Iterator[int]:
        return self.numbers


def test_a_stream_that_does_not_begin_anew_is_refused() -> None:
    with pytest.raises(ConfigError, match="this Exhausted can be read only once"):
        DataLoader(Exhausted(), global_batch_size=10, **ONE)


# Batches that another loader makes --------------------------------------------------------------------------------------------------------


class Batches:
    """Global batches of 5, 4 and 1 samples."""

    def __init__(self, *sizes: int):
        self.sizes = sizes or (5, 4, 1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        begin = 0
        for size in self.sizes:
            places = torch.arange(begin, begin + size)
            yield {"inputs": places, "names": [f"sample {place}" for place in places], "scale": 2.0}
            begin += size

    def __len__(self) -> int:
        return len(self.sizes)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batches_of_another_loader_are_cut_for_ranks(world_size: int) -> None:
    ranks = [DataLoader.from_loader(Batches(), micro_batch_size=2, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert {len(loader) for loader in ranks} == {3}
    found: list[list[int]] = [[], [], []]
    for loader in ranks:
        for step in loader:
            for batch in step:
                assert 1 <= len(batch["inputs"]) <= 2
                assert batch["names"] == [f"sample {place}" for place in batch["inputs"]]
                assert batch["scale"] == 2.0
                found[step.index] += batch["inputs"].tolist()
    assert found == [[0, 1, 2, 3, 4], [5, 6, 7, 8], [9]]


def test_a_torch_loader_over_a_stream_keeps_its_batches_and_workers() -> None:
    torch_loader = torch.utils.data.DataLoader(Stream(23), batch_size=4, num_workers=2)
    expected = [[int(index) for index, _number in batch.tolist()] for batch in torch_loader]
    numbers = torch.get_rng_state()
    DataLoader.from_loader(torch_loader, **ONE)
    assert torch.equal(torch.get_rng_state(), numbers)  # nothing is iterated before the first step
    ranks = [DataLoader.from_loader(torch_loader, rank=rank, world_size=3) for rank in range(3)]
    found = [[[int(index) for batch in step for index, _number in batch.tolist()] for step in loader] for loader in ranks]
    assert [list(itertools.chain(*parts)) for parts in zip(*found, strict=True)] == expected


def test_an_empty_global_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="must hold at least one sample, but the loader gave an empty one"):
        list(DataLoader.from_loader(Batches(3, 0), **ONE))


def test_a_position_in_a_stream_fits_no_other_settings() -> None:
    state = DataLoader(Stream(25), global_batch_size=10, **ONE).state_dict()
    with pytest.raises(CheckpointMismatch, match="global_batch_size is 5 here and 10 there"):
        DataLoader(Stream(25), global_batch_size=5, **ONE).load_state_dict(state)
