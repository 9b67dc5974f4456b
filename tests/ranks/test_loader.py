"""Loaders on real ranks: each finds its part by itself, and together they have every sample once."""

import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, RandomSampler, Sampler, Subset, TensorDataset, random_split

import hora
from hora.errors import CollectiveMismatch, ConfigError
from hora.sync.control import Place
from hora.testing import run_ranks

SAMPLES = TensorDataset(torch.arange(53))


def _global_batches(loader: hora.DataLoader) -> list[list[int]]:
    """The samples of each step over all ranks, in the order of ranks."""
    mine = [[index for (indices,) in step for index in indices.tolist()] for step in loader]
    every = hora.all_gather_object(mine)
    return [[index for part in parts for index in part] for parts in zip(*every, strict=True)]


def _expected(**settings) -> list[list[int]]:
    one = hora.DataLoader(SAMPLES, rank=0, world_size=1, **settings)
    return [[index for (indices,) in step for index in indices.tolist()] for step in one]


@run_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_ranks_find_their_part_and_share_out_every_global_batch(num_workers: int) -> None:
    loader = hora.DataLoader(SAMPLES, global_batch_size=10, micro_batch_size=2, num_workers=num_workers)
    for epoch in range(2):
        expected = hora.DataLoader(SAMPLES, global_batch_size=10, rank=0, world_size=1)
        expected.set_epoch(epoch)
        assert _global_batches(loader) == [[i for (indices,) in step for i in indices.tolist()] for step in expected]


@run_ranks(1, 2, 3, 4)
def test_ranks_draw_one_order_from_a_sampler(world_size: int) -> None:
    torch.manual_seed(hora.rank())
    generator = torch.Generator().manual_seed(hora.rank())
    for sampler in (RandomSampler(SAMPLES), RandomSampler(SAMPLES, generator=generator)):
        found = _global_batches(hora.DataLoader(SAMPLES, global_batch_size=10, sampler=sampler))
        assert [len(batch) for batch in found] == [10] * 5 + [3]
        assert sorted(index for batch in found for index in batch) == list(range(53))
        assert found == _expected(global_batch_size=10, sampler=sampler)


class OwnRandomness(Sampler[int]):
    def __init__(self) -> None:
        self.random = random.Random(hora.rank() // 2)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(53), 53))


@run_ranks(3, 4)
def test_ranks_that_draw_different_orders_are_named(world_size: int) -> None:
    loader = hora.DataLoader(SAMPLES, global_batch_size=10, sampler=OwnRandomness())
    with pytest.raises(CollectiveMismatch, match=rf"in epoch 0 ranks \[2{', 3' if world_size == 4 else ''}\] drew another one than rank 0"):
        next(iter(loader))


@run_ranks(1, 3)
def test_ranks_that_would_deal_from_other_samples_are_named(world_size: int) -> None:
    odd = int(hora.rank() == 2)
    makers = {
        "subset is '[0-9a-f]+' on rank 0 and '[0-9a-f]+' on rank 2; give random_split a generator": lambda: hora.DataLoader(
            random_split(SAMPLES, [40, 13], torch.Generator().manual_seed(odd))[0], global_batch_size=8
        ),
        "num_samples is 50 on rank 0 and 49 on rank 2; .* the same arguments": lambda: hora.DataLoader(
            range(50 - odd), global_batch_size=8
        ),
        "seed is 0 on rank 0 and 1 on rank 2": lambda: hora.DataLoader(SAMPLES, global_batch_size=8, seed=odd),
        "drop_last is False on rank 0 and True": lambda: hora.DataLoader(iter_anew, global_batch_size=8, drop_last=bool(odd)),
        "all ranks must make the same TextStream.*num_tokens is 100 on rank 0 and 99": lambda: hora.TextStream(
            torch.arange(100 - odd), global_batch_size=3, window=5
        ),
    }
    iter_anew = dict.fromkeys(range(9)).keys()
    for message, make in makers.items():
        if world_size == 1:
            make()
            continue
        with pytest.raises(CollectiveMismatch, match=message):
            make()
    hora.DataLoader(range(8 + hora.rank()), global_batch_size=4, rank=0, world_size=1)  # of its own, and no business of others


class Stream(IterableDataset[object]):
    """The samples from `first` to 20, each `step`-th, as `make` makes them."""

    def __init__(self, first: int, step: int, make: Callable[[int], object]):
        self.first, self.step, self.make = first, step, make

    def __iter__(self) -> Iterator[object]:
        return map(self.make, range(self.first, 20, self.step))


def _numbered(number: int) -> object:
    return torch.tensor(number), {"text": f"sample {number}", "array": np.full(2, number)}


@run_ranks(3)
def test_a_stream_that_deals_out_its_samples_itself_is_refused() -> None:
    refused = (
        r"the first sample of epoch 0 is another one on ranks \[1, 2\] than on rank 0; let the data set give all samples on every rank"
    )
    for num_workers in (0, 1):
        loader = hora.DataLoader(Stream(hora.rank(), 3, _numbered), global_batch_size=6, num_workers=num_workers)
        with pytest.raises(CollectiveMismatch, match=refused):
            next(iter(loader))
    noise = Stream(0, 1, lambda _number: torch.randn(3, 100, 100, generator=torch.Generator().manual_seed(min(hora.rank(), 1))))
    with pytest.raises(CollectiveMismatch, match=refused):
        next(iter(hora.DataLoader(noise, global_batch_size=6)))
    batches = torch.utils.data.DataLoader(Stream(hora.rank(), 3, int), batch_size=6)
    with pytest.raises(CollectiveMismatch, match=refused):
        next(iter(hora.DataLoader.from_loader(batches)))
    with pytest.raises(CollectiveMismatch, match=r"epoch 0 is another one on ranks \[2\] than on rank 0"):  # where it gives nothing
        next(iter(hora.DataLoader(Stream(20 * (hora.rank() == 2), 1, int), global_batch_size=6)), None)


@run_ranks(2)
def test_a_stream_that_one_rank_alone_goes_through_is_told_of() -> None:
    loader = hora.DataLoader(Stream(0, 1, int), global_batch_size=6)
    with pytest.raises(
        CollectiveMismatch,
        match=r"rank 0 is about to .* 'all_gather_object of what a stream begins epoch 0 with'.*rank 1 is about to barrier",
    ):
        next(iter(loader)) if hora.rank() == 0 else hora.barrier()


@run_ranks(3)
def test_a_stream_that_is_the_same_on_all_ranks_is_dealt_out() -> None:
    off = 1 + 1e-4 * hora.rank()  # as processors of another kind may compute
    loader = hora.DataLoader(
        Stream(0, 1, lambda number: torch.tensor([number + off * random.random(), math.nan, math.inf])), global_batch_size=6
    )
    assert [len(next(iter(loader))) for _epoch in range(2)] == [1, 1]
    loader.load_state_dict({**loader.state_dict(), "epoch": 5, "step": 4})
    assert list(loader) == []  # the end of epoch 5, of which nothing is left
    unknown = hora.DataLoader(Stream(0, 1, lambda _number: object()), global_batch_size=6, collate_fn=len)
    assert [list(step) for step in unknown] == [[2]] * 3 + ([[]] if hora.rank() == 2 else [[1]])


@run_ranks(1, 2, 3, 4)
def test_evaluation_over_ranks_equals_one_process() -> None:
    inputs, targets = torch.randn(101, 4, dtype=torch.float64), torch.randint(3, (101,))
    model = nn.Linear(4, 3, dtype=torch.float64)
    total = torch.zeros(2, dtype=torch.float64)
    for step in hora.DataLoader(TensorDataset(inputs, targets), global_batch_size=16, micro_batch_size=3, shuffle=False):
        for batch, labels in step:
            total[0] += F.cross_entropy(model(batch), labels, reduction="sum").detach()
            total[1] += len(labels)
    hora.all_reduce(total)
    assert total[1] == 101
    torch.testing.assert_close(total[0], F.cross_entropy(model(inputs), targets, reduction="sum").detach(), rtol=1e-12, atol=0)


@run_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_training_with_a_ragged_end_equals_one_process(micro_batch_size: int | None) -> None:
    """The last global batch has one sample, so on most ranks it has no micro-batch."""
    inputs, targets = torch.randn(25, 4, dtype=torch.float64), torch.randint(3, (25,))
    dataset = TensorDataset(inputs, targets)
    model, alone = (nn.Linear(4, 3, dtype=torch.float64) for _ in range(2))
    alone.load_state_dict(model.state_dict())

    optimizer = hora.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 0.1), model)
    loader = hora.DataLoader(dataset, global_batch_size=8, micro_batch_size=micro_batch_size)
    for _ in range(2):
        for step in loader:
            for batch, labels in optimizer.micro_batches(step):
                optimizer.backward(F.cross_entropy(model(batch), labels, reduction="sum"), weight=len(labels))
            optimizer.step()

    plain = torch.optim.AdamW(alone.parameters(), 0.1)
    one = hora.DataLoader(dataset, global_batch_size=8, rank=0, world_size=1)
    for _ in range(2):
        for step in one:
            for batch, labels in step:
                plain.zero_grad()
                F.cross_entropy(alone(batch), labels).backward()
                plain.step()
    torch.testing.assert_close(model.weight, alone.weight, rtol=1e-9, atol=1e-12)


@run_ranks(1, 3)
def test_other_tensors_on_some_ranks_are_warned_of(world_size: int) -> None:
    split = torch.randperm(60, generator=torch.Generator().manual_seed(min(hora.rank(), 1)))[:50]
    texts = [f"item {number}" for number in split.tolist()]
    near = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) * (1 + 1e-5 * hora.rank())
    said = _Said(logging.WARNING)
    logging.getLogger("hora").addHandler(said)
    try:
        for dataset in (TensorDataset(near), Subset(TensorDataset(near), range(9)), TensorDataset(torch.zeros(9)), texts):
            hora.DataLoader(dataset, global_batch_size=5)
        hora.DataLoader(TensorDataset(split), global_batch_size=5, rank=0, world_size=1)
        assert said.messages == []
        hora.DataLoader(Subset(TensorDataset(near, split), range(9)), global_batch_size=5)
    finally:
        logging.getLogger("hora").removeHandler(said)
    assert ["other samples on ranks [1, 2] than on rank 0" in message for message in said.messages] == [True] * (
        world_size > 1 and hora.rank() == 0
    )


class _Said(logging.Handler):
    def __init__(self, level: int):
        super().__init__(level)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _loss(model: nn.Module, batch: Any, state: None) -> tuple[Tensor, int, dict[str, Tensor], None]:
    return model(batch[0][:, None].float()).sum(), len(batch[0]), {}, state


@run_ranks(1, 3)
def test_ranks_that_have_come_to_different_steps_of_the_data_make_no_update(world_size: int) -> None:
    places = (
        r"make an update with the same step of the data.*: rank 0 at step 0 of epoch 0, ranks 1 and 2 at step 0 of epoch 1; begin and leave"
    )
    expectation = nullcontext() if world_size == 1 else pytest.raises(CollectiveMismatch, match=places)
    few = TensorDataset(torch.arange(2))  # of which one rank has none
    for dataset, in_one, settings in (
        (SAMPLES, False, {}),
        (few, False, {}),
        (SAMPLES, True, {}),
        (SAMPLES, True, {"micro_batch_size": "auto"}),
    ):
        loader = hora.DataLoader(dataset, global_batch_size=9)
        if hora.rank() > 0:
            next(iter(loader))  # to look at a batch
        step = next(iter(loader))
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with expectation:
            if in_one:
                hora.TrainStep(model, _loss, optimizer, **settings)(step)
            else:
                optimizer = hora.DistributedOptimizer(optimizer, model)
                for batch in optimizer.micro_batches(step):
                    optimizer.backward(_loss(model, batch, None)[0], weight=len(batch[0]))


@run_ranks(1, 2)
def test_a_step_that_may_be_replayed_is_agreed_on_with_its_place_in_the_data(world_size: int) -> None:
    """As before each step on GPUs, where the update itself is told to nobody."""
    model = nn.Linear(1, 1)
    train_step = hora.TrainStep(model, _loss, torch.optim.SGD(model.parameters(), lr=0.1))
    assert train_step._agree("step 0", float(hora.rank()), 2.0, Place(3, 4)) == (world_size - 1, [2.0] * world_size)
    assert train_step._tell("capture", 1.0) == [1.0] * world_size
    with (
        nullcontext()
        if world_size == 1
        else pytest.raises(CollectiveMismatch, match="rank 0 at step 4 of epoch 0, rank 1 at step 4 of epoch 1")
    ):
        train_step._agree("step 1", 0.0, 2.0, Place(hora.rank(), 4))


@run_ranks(2)
def test_ranks_may_train_with_loaders_of_their_own_at_any_place() -> None:
    model = nn.Linear(1, 1)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader = hora.DataLoader(SAMPLES, global_batch_size=9, rank=0, world_size=1)
    loader.set_epoch(hora.rank())
    shared = next(iter(hora.DataLoader(SAMPLES, global_batch_size=9)))
    for step in (next(iter(loader)), [] if hora.rank() else shared):
        for batch in optimizer.micro_batches(step):
            optimizer.backward(_loss(model, batch, None)[0], weight=len(batch[0]))
        optimizer.step()


@run_ranks(1, 2, 3)
def test_rows_of_a_text_are_shared_out() -> None:
    stream = hora.TextStream(torch.arange(100), global_batch_size=3, window=5)
    every = hora.all_gather_object([stream.rows.start, stream.rows.stop])
    assert [row for start, stop in every for row in range(start, stop)] == [0, 1, 2]
    evaluation = hora.TextStream(torch.arange(100), global_batch_size=3, window=5, drop_last=False)
    predicted = sum(batch.targets.numel() for step in evaluation for batch in step)
    assert hora.all_reduce(torch.tensor(predicted)).item() == 99


@run_ranks(4)
def test_more_ranks_than_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 rows are dealt to 4 ranks"):
        hora.TextStream(torch.arange(100), global_batch_size=3, window=5)
