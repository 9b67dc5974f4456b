import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from hora import events
from hora.data.loader import DataLoader
from hora.data.steps import Step
from hora.errors import CheckpointMismatch, ConfigError, DataError


class Numbers(Dataset[Tensor]):
    """The samples 0 to `length` - 1; knows which were loaded in this process."""

    def __init__(self, length: int):
        self.length = length
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.loaded.append(index)
        return torch.tensor(index)


def loaders(world_size: int, dataset: Any, **settings: Any) -> list[DataLoader]:
    return [DataLoader(dataset, rank=rank, world_size=world_size, **settings) for rank in range(world_size)]


def samples(step: Step) -> list[int]:
    return [index for micro_batch in step for index in micro_batch.tolist()]


def global_batches(ranks: Sequence[DataLoader]) -> list[list[int]]:
    """The samples of each step over all ranks; all of them must have the same steps."""
    return [list(itertools.chain(*map(samples, steps))) for steps in zip(*ranks, strict=True)]


ONE = {"rank": 0, "world_size": 1}


# What is in a step ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch_size", [None, 1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_global_batches_are_the_same_for_any_number_of_ranks(world_size: int, micro_batch_size: int | None) -> None:
    expected = global_batches(loaders(1, Numbers(53), global_batch_size=10, seed=3))
    assert global_batches(loaders(world_size, Numbers(53), global_batch_size=10, seed=3, micro_batch_size=micro_batch_size)) == expected


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [10] * 5 + [3]), (True, [10] * 5)])
def test_an_epoch_holds_every_sample_once_and_a_ragged_end_with_its_true_size(drop_last: bool, sizes: list[int]) -> None:
    ranks = loaders(4, Numbers(53), global_batch_size=10, drop_last=drop_last)
    batches = global_batches(ranks)
    assert [len(batch) for batch in batches] == sizes
    assert len(set(itertools.chain(*batches))) == sum(sizes)
    assert {len(loader) for loader in ranks} == {len(sizes)}


def test_micro_batches_are_never_empty_and_a_rank_may_have_none() -> None:
    ranks = loaders(4, Numbers(11), global_batch_size=8, micro_batch_size=1)
    lengths = [[[len(micro_batch) for micro_batch in step] for step in loader] for loader in ranks]
    assert lengths == [[[1, 1], [1]], [[1, 1], [1]], [[1, 1], [1]], [[1, 1], []]]


def test_steps_say_where_they_stand() -> None:
    loader = DataLoader(Numbers(8), global_batch_size=4, micro_batch_size=1, logical_ranks=4, rank=1, world_size=2)
    assert [(step.epoch, step.index, len(step), step.logical_ranks) for step in loader] == [(0, 0, 2, (2, 3)), (0, 1, 2, (2, 3))]
    assert [step.epoch for step in loader] == [1, 1]


def test_evaluation_order_is_that_of_the_data_set() -> None:
    batches = global_batches(loaders(3, Numbers(11), global_batch_size=4, shuffle=False))
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_evaluation_over_ranks_counts_each_sample_once() -> None:
    ranks = loaders(4, Numbers(1003), global_batch_size=64, shuffle=False)
    assert sum(sum(samples(step)) for loader in ranks for step in loader) == sum(range(1003))


# Going through epochs -------------------------------------------------------------------------------------------------------------------


def test_iterating_again_is_the_next_epoch_in_another_order() -> None:
    loader = DataLoader(Numbers(40), global_batch_size=40, **ONE)
    orders = [global_batches([loader])[0] for _ in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert loader.state_dict()["epoch"] == 3
    loader.set_epoch(1)
    assert global_batches([loader])[0] == orders[1]


def test_an_epoch_left_early_is_followed_by_the_next_one() -> None:
    loader = DataLoader(Numbers(40), global_batch_size=10, **ONE)
    whole = global_batches([DataLoader(Numbers(40), global_batch_size=10, **ONE)])
    for step in loader:
        assert samples(step) == whole[step.index]
        if step.index == 1:
            break
    assert (loader.epoch, loader.step) == (0, 2)
    assert [(step.epoch, step.index) for step in loader] == [(1, index) for index in range(4)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_step_left_early_does_not_disturb_the_next_ones(num_workers: int, taken: int) -> None:
    expected = global_batches([DataLoader(Numbers(40), global_batch_size=10, **ONE)])
    loader = DataLoader(Numbers(40), global_batch_size=10, micro_batch_size=4, num_workers=num_workers, **ONE)
    for step in loader:
        if step.index % 2:
            assert samples(step) == expected[step.index]
        else:
            list(itertools.islice(step, taken))


def test_a_step_begun_can_be_gone_on_with() -> None:
    step = next(iter(DataLoader(Numbers(10), global_batch_size=10, micro_batch_size=4, shuffle=False, **ONE)))
    assert next(iter(step)).tolist() == [0, 1, 2, 3]
    assert samples(step) == [4, 5, 6, 7, 8, 9]


def test_a_step_that_is_over_is_refused_instead_of_being_empty() -> None:
    steps = list(DataLoader(Numbers(40), global_batch_size=10, **ONE))
    for step in steps:
        with pytest.raises(DataError, match=f"step {step.index} of epoch 0 can be iterated once"):
            next(iter(step))
    step = next(iter(DataLoader(Numbers(40), global_batch_size=10, **ONE)))
    samples(step)
    with pytest.raises(DataError, match="can be iterated once"):
        samples(step)


def test_a_step_without_micro_batches_is_empty_every_time() -> None:
    (step,) = DataLoader(Numbers(1), global_batch_size=1, rank=1, world_size=2)
    assert samples(step) == samples(step) == []


def test_two_loops_over_one_loader_are_refused() -> None:
    loader = DataLoader(Numbers(40), global_batch_size=10, **ONE)
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(DataError, match="iterated by one loop at a time"):
        next(first)


# Position -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_restored_run_goes_on_with_the_very_next_step(num_workers: int) -> None:
    settings = {"global_batch_size": 10, "micro_batch_size": 3, "num_workers": num_workers, **ONE}
    loader = DataLoader(Numbers(33), **settings)
    expected, states = [], []
    for _ in range(2):
        for step in loader:
            expected.append(samples(step))
            states.append(loader.state_dict())
    for done, state in enumerate(states, 1):
        resumed = DataLoader(Numbers(33), **settings)
        resumed.load_state_dict(state)
        found = [samples(step) for _ in range(2 - state["epoch"]) for step in resumed]
        assert found == expected[done:], f"after step {done}"


def test_a_restored_run_loads_nothing_twice() -> None:
    dataset = Numbers(40)
    loader = DataLoader(dataset, global_batch_size=10, **ONE)
    loader.load_state_dict({**loader.state_dict(), "step": 3})
    batches = global_batches([loader])
    assert dataset.loaded == batches[0]
    assert len(dataset.loaded) == 10


def test_the_position_counts_steps_handed_out_not_those_loaded_ahead() -> None:
    loader = DataLoader(Numbers(100), global_batch_size=5, num_workers=1, prefetch_factor=4, **ONE)
    steps = iter(loader)
    next(steps)
    next(steps)
    assert loader.state_dict()["step"] == 2


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (1, 4), (3, 1)])
def test_a_run_can_go_on_with_another_number_of_ranks(before: int, after: int) -> None:
    expected = global_batches(loaders(1, Numbers(57), global_batch_size=10))
    first = loaders(before, Numbers(57), global_batch_size=10)
    found = [list(itertools.chain(*map(samples, steps))) for steps in itertools.islice(zip(*first, strict=True), 2)]
    states = [loader.state_dict() for loader in first]
    assert all(state == states[0] for state in states)
    second = loaders(after, Numbers(57), global_batch_size=10)
    for loader in second:
        loader.load_state_dict(states[0])
    assert found + global_batches(second) == expected


def test_a_position_at_the_end_of_an_epoch_finishes_that_epoch_first() -> None:
    loader = DataLoader(Numbers(20), global_batch_size=10, **ONE)
    for _step in loader:
        state = loader.state_dict()
    assert (state["epoch"], state["step"]) == (0, 2)
    loader.load_state_dict(state)
    assert list(loader) == []
    assert [step.epoch for step in loader] == [1, 1]


def test_set_epoch_keeps_a_position_just_restored() -> None:
    loader = DataLoader(Numbers(40), global_batch_size=10, **ONE)
    loader.load_state_dict({**loader.state_dict(), "epoch": 5, "step": 2})
    loader.set_epoch(5)
    assert [(step.epoch, step.index) for step in loader] == [(5, 2), (5, 3)]
    loader.set_epoch(5)
    assert [(step.epoch, step.index) for step in loader] == [(5, index) for index in range(4)]
    with pytest.raises(ConfigError, match="epoch must be at least 0"):
        loader.set_epoch(-1)


def test_a_position_of_other_data_is_refused_naming_what_differs() -> None:
    state = DataLoader(Numbers(40), global_batch_size=10, seed=1, **ONE).state_dict()
    with pytest.raises(CheckpointMismatch, match="num_samples is 41 here and 40 there; seed is 2 here and 1 there"):
        DataLoader(Numbers(41), global_batch_size=10, seed=2, **ONE).load_state_dict(state)
    with pytest.raises(CheckpointMismatch, match="global_batch_size is 20 here and 10 there; seed is 0 here.*drop_last is True here"):
        DataLoader(Numbers(40), global_batch_size=20, drop_last=True, **ONE).load_state_dict(state)
    with pytest.raises(CheckpointMismatch, match="must have drop_last, epoch"):
        DataLoader(Numbers(40), global_batch_size=20, **ONE).load_state_dict({"step": 3})


def test_a_position_in_another_subset_is_refused() -> None:
    for size in (9, 5000):
        chosen = list(range(2 * size))
        state = DataLoader(Subset(Numbers(2 * size), chosen[:size]), global_batch_size=2, **ONE).state_dict()
        same = Subset(Subset(Numbers(2 * size), torch.arange(2 * size)), range(size))
        DataLoader(same, global_batch_size=2, **ONE).load_state_dict(state)
        with pytest.raises(CheckpointMismatch, match="subset is '[0-9a-f]+' here and '[0-9a-f]+' there"):
            DataLoader(Subset(Numbers(2 * size), chosen[size:]), global_batch_size=2, **ONE).load_state_dict(state)


def test_a_data_set_that_has_grown_or_shrunk_is_refused() -> None:
    dataset = Numbers(6)
    loader = DataLoader(dataset, global_batch_size=2, **ONE)
    assert sum(map(len, map(samples, loader))) == 6
    for epoch, length in ((1, 8), (2, 4)):
        dataset.length = length
        with pytest.raises(
            ConfigError, match=f"had 6 samples when its loader was made and has {length} in epoch {epoch}; make a new loader"
        ):
            list(loader)


# Events ---------------------------------------------------------------------------------------------------------------------------------


class Log(events.Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int, list[int]]] = []

    def on_samples(self, *, epoch: int, step: int, micro_step: int, indices: Sequence[int]) -> None:
        self.seen.append((epoch, step, micro_step, list(indices)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_observer_hears_of_each_micro_batch_handed_out(num_workers: int) -> None:
    loader = DataLoader(Numbers(10), global_batch_size=6, micro_batch_size=4, num_workers=num_workers, **ONE)
    with events.observe(Log()) as log:
        handed = [micro_batch.tolist() for step in loader for micro_batch in step]
    assert log.seen == [(0, 0, 0, handed[0]), (0, 0, 1, handed[1]), (0, 1, 0, handed[2])]


def test_an_observer_hears_the_right_samples_after_an_epoch_left_early() -> None:
    loader = DataLoader(Numbers(40), global_batch_size=10, num_workers=1, persistent_workers=True, **ONE)
    samples(next(iter(loader)))  # with more requests on their way
    with events.observe(Log()) as log:
        handed = global_batches([loader])
    assert [indices for *_place, indices in log.seen] == handed


# What is loaded -------------------------------------------------------------------------------------------------------------------------


def test_tensors_are_taken_at_once_and_equal_one_by_one() -> None:
    tensors = torch.randn(50, 3), torch.arange(50), torch.rand(50, 2, 2).to(torch.float16)
    dataset = TensorDataset(*tensors)
    for subset in (dataset, Subset(dataset, range(49, 9, -1)), Subset(Subset(dataset, range(40)), range(5, 30))):
        fast = DataLoader(subset, global_batch_size=7, micro_batch_size=4, **ONE)
        slow = DataLoader(subset, global_batch_size=7, micro_batch_size=4, collate_fn=default_collate, **ONE)
        for fast_step, slow_step in zip(fast, slow, strict=True):
            for taken, collated in zip(fast_step, slow_step, strict=True):
                assert type(taken) is type(collated)
                assert all(torch.equal(left, right) and left.dtype == right.dtype for left, right in zip(taken, collated, strict=True))


class Bulk(Numbers):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        self.loaded += [-1]
        return [torch.tensor(index) for index in indices]


def test_a_data_set_that_loads_many_at_once_is_asked_for_micro_batches() -> None:
    dataset = Bulk(10)
    assert sorted(itertools.chain(*global_batches([DataLoader(dataset, global_batch_size=5, **ONE)]))) == list(range(10))
    assert dataset.loaded == [-1, -1]


def test_collate_fn_gets_the_samples_of_a_micro_batch() -> None:
    loader = DataLoader(
        Numbers(5), global_batch_size=5, micro_batch_size=2, shuffle=False, collate_fn=lambda batch: [int(s) for s in batch], **ONE
    )
    assert [micro_batch for step in loader for micro_batch in step] == [[0, 1], [2, 3], [4]]


def test_persistent_workers_serve_every_epoch_and_every_start() -> None:
    settings = {"global_batch_size": 10, **ONE}
    plain = DataLoader(Numbers(25), **settings)
    loader = DataLoader(Numbers(25), num_workers=2, persistent_workers=True, **settings)
    assert [global_batches([loader]) for _ in range(2)] == [global_batches([plain]) for _ in range(2)]
    samples(next(iter(loader)))  # leaves epoch 2 early, with more of it loaded ahead
    plain.set_epoch(3)
    assert global_batches([loader]) == global_batches([plain])


class Broken(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        if index == 13:
            raise KeyError("no such picture")
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_the_data_set_says_where(num_workers: int) -> None:
    loader = DataLoader(Broken(20), global_batch_size=10, shuffle=False, num_workers=num_workers, rank=1, world_size=4)
    loader.set_epoch(2)
    notes = []
    try:
        for step in loader:
            samples(step)
    except KeyError as error:
        notes = error.__notes__
    assert notes == ["while loading the micro-batch of rank 1 of 4 in step 1 of epoch 2 (samples 13, 14, 15 of the data set)"]


# What is refused ------------------------------------------------------------------------------------------------------------------------


class Unmeasured:
    def __getitem__(self, index: int) -> int:
        return index


def stream() -> Iterator[int]:
    yield from range(10)


@pytest.mark.parametrize(
    ("dataset", "settings", "message"),
    [
        ([], {"global_batch_size": 4}, "the data set must hold at least one sample, but is empty"),
        ([1], {}, "global_batch_size must be given"),
        ([1], {"global_batch_size": 0}, "global_batch_size must be an integer of at least 1, but is 0 instead"),
        ([1], {"global_batch_size": 2.5, "micro_batch_size": -1}, "global_batch_size .* is 2.5 instead; micro_batch_size .* is -1 instead"),
        ([1], {"global_batch_size": 2, "drop_last": True}, "an epoch must have at least one step"),
        ([1], {"global_batch_size": 1, "sampler": [0], "shuffle": True}, "sampler decides the order: it does not go with shuffle=True"),
        (
            [1],
            {"global_batch_size": 1, "batch_sampler": [[0]], "drop_last": True},
            "batch_sampler decides what is in a global batch: it does not go with global_batch_size, drop_last",
        ),
        (torch.utils.data.DataLoader([1]), {"global_batch_size": 1}, "is a loader already; use hora.DataLoader.from_loader\\(loader\\)"),
        (Unmeasured(), {"global_batch_size": 1}, "must have a length, but this Unmeasured has none"),
        (stream(), {"global_batch_size": 1}, "this generator can be read only once"),
        ([1], {"global_batch_size": 1, "batch_size": 4}, "does not take batch_size \\(use global_batch_size"),
        ([1], {"global_batch_size": 1, "workers": 4}, "does not take workers \\(there is no such argument\\)"),
        ([1], {"global_batch_size": 1, "timeout": 5}, "use it with num_workers of at least 1"),
        ([1], {"global_batch_size": 1, "persistent_workers": True}, "torch's DataLoader refuses its arguments: persistent_workers"),
        ([1], {"global_batch_size": 1, "num_workers": -1}, "torch's DataLoader refuses its arguments: num_workers"),
        (
            [1],
            {"global_batch_size": 1, "num_workers": 1, "multiprocessing_context": "thread"},
            "multiprocessing_context must be one of fork",
        ),
        ([1], {"global_batch_size": 1, "logical_ranks": 0}, "each real rank plays at least one logical rank"),
    ],
)
def test_mistakes_are_refused_before_the_first_step(dataset: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataLoader(dataset, **settings, **ONE)


@pytest.mark.parametrize(("rank", "world_size"), [(0, None), (None, 2), (2, 2), (-1, 2)])
def test_a_role_that_cannot_be_is_refused(rank: int | None, world_size: int | None) -> None:
    with pytest.raises(ConfigError, match="rank"):
        DataLoader(Numbers(4), global_batch_size=4, rank=rank, world_size=world_size)


def test_a_process_started_with_others_must_call_init_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="this process is rank 1 of 4 .* hora.init\\(\\) must be called before"):
        DataLoader(Numbers(4), global_batch_size=4)


def test_a_process_alone_needs_no_init() -> None:
    assert [samples(step) for step in DataLoader(Numbers(4), global_batch_size=4, shuffle=False)] == [[0, 1, 2, 3]]


@pytest.mark.parametrize(("num_samples", "global_batch_size", "idle"), [(100, 3, 1), (2, 8, 2), (100, 4, 0), (5, 4, 0)])
def test_ranks_that_never_get_a_sample_are_told_of_once(
    num_samples: int, global_batch_size: int, idle: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="hora"):
        ranks = loaders(4, Numbers(num_samples), global_batch_size=global_batch_size)
        global_batches(ranks)
    expected = [f"{idle} of 4 ranks never get a sample: the largest global batch has {4 - idle}, dealt to 4 logical ranks"] if idle else []
    assert [record.message for record in caplog.records] == expected
