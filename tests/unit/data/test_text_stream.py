import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from hora import events
from hora.data.streams import TextBatch, TextStream
from hora.errors import CheckpointMismatch, ConfigError

ONE = {"rank": 0, "world_size": 1}


def ranks(world_size: int, tokens: Tensor, **settings: Any) -> list[TextStream]:
    return [TextStream(tokens, rank=rank, world_size=world_size, **settings) for rank in range(world_size)]


def ptb_windows(tokens: Tensor, rows: int, window: int) -> list[tuple[Tensor, Tensor]]:
    """What the reader of the TensorFlow tutorial, and of texar's example after it, yields."""
    length = len(tokens) // rows
    data = tokens[: rows * length].view(rows, length)
    return [(data[:, i * window : (i + 1) * window], data[:, i * window + 1 : (i + 1) * window + 1]) for i in range((length - 1) // window)]


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_steps_are_those_of_the_ptb_reader_for_any_number_of_ranks(world_size: int, micro_batch_size: int | None) -> None:
    tokens = torch.arange(5 * 47 + 3, dtype=torch.int32)
    streams = ranks(world_size, tokens, global_batch_size=5, window=6, micro_batch_size=micro_batch_size)
    expected = ptb_windows(tokens, 5, 6)
    assert {len(stream) for stream in streams} == {len(expected)}
    for steps, (inputs, targets) in zip(zip(*streams, strict=True), expected, strict=True):
        batches = [batch for step in steps for batch in step]
        assert torch.equal(torch.cat([batch.inputs for batch in batches]), inputs)
        assert torch.equal(torch.cat([batch.targets for batch in batches]), targets)
        assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for batch in batches for tensor in batch)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_rows_are_dealt_in_blocks_and_none_is_lost(world_size: int) -> None:
    streams = ranks(world_size, torch.arange(200), global_batch_size=5, window=6, micro_batch_size=2)
    assert list(itertools.chain(*(stream.rows for stream in streams))) == [0, 1, 2, 3, 4]
    for stream in streams:
        for step in stream:
            assert list(itertools.chain(*(batch.rows for batch in step))) == list(stream.rows)


def test_a_micro_batch_unpacks_to_inputs_and_targets() -> None:
    step = next(iter(TextStream(torch.arange(14), global_batch_size=2, window=6, **ONE)))
    (batch,) = step
    inputs, targets = batch
    assert isinstance(batch, TextBatch)
    assert inputs.tolist() == [[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]
    assert targets.tolist() == [[1, 2, 3, 4, 5, 6], [8, 9, 10, 11, 12, 13]]
    assert batch.rows == range(2)


@pytest.mark.parametrize("num_tokens", [2, 5, 58, 61, 100])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_predicts_each_token_but_the_first_once_whatever_the_ranks(world_size: int, num_tokens: int) -> None:
    tokens = torch.randperm(num_tokens)
    predicted = []
    for stream in ranks(world_size, tokens, global_batch_size=4, window=7, drop_last=False):
        for step in stream:
            for batch in step:
                assert set(batch.rows) <= set(stream.rows)
                predicted += list(zip(batch.inputs.flatten().tolist(), batch.targets.flatten().tolist(), strict=True))
    assert sorted(predicted) == sorted(itertools.pairwise(tokens.tolist()))


def test_logical_ranks_keep_their_micro_batches_for_any_number_of_ranks() -> None:
    def dealt(world_size: int) -> list[list[tuple[int, range]]]:
        streams = ranks(world_size, torch.arange(200), global_batch_size=7, window=6, micro_batch_size=1, logical_ranks=4)
        return [
            [(logical_rank, batch.rows) for step in steps for logical_rank, batch in zip(step.logical_ranks, step, strict=True)]
            for steps in zip(*streams, strict=True)
        ]

    assert dealt(1) == dealt(2) == dealt(3) == dealt(4)


def test_a_restored_stream_goes_on_with_the_very_next_window() -> None:
    settings = {"global_batch_size": 3, "window": 5}
    expected = [step_inputs for stream in ranks(1, torch.arange(100), **settings) for step_inputs in map(inputs_of, stream)]
    first = TextStream(torch.arange(100), **settings, **ONE)
    for step in first:
        if step.index == 2:
            state = first.state_dict()
            break
    for world_size in (1, 2, 3):
        streams = ranks(world_size, torch.arange(100), **settings)
        for stream in streams:
            stream.load_state_dict(state)
        assert [list(itertools.chain(*map(inputs_of, steps))) for steps in zip(*streams, strict=True)] == expected[3:]
        assert [(stream.epoch, stream.step) for stream in streams] == [(1, 0)] * world_size


def inputs_of(step: Any) -> list[list[int]]:
    return [row for batch in step for row in batch.inputs.tolist()]


def test_a_position_in_another_text_is_refused() -> None:
    state = TextStream(torch.arange(100), global_batch_size=3, window=5, **ONE).state_dict()
    with pytest.raises(CheckpointMismatch, match="num_tokens is 101 here and 100 there; window is 6 here and 5 there"):
        TextStream(torch.arange(101), global_batch_size=3, window=6, **ONE).load_state_dict(state)


class Heard(events.Observer):
    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def on_samples(self, *, epoch: int, step: int, micro_step: int, indices: Any) -> None:
        self.rows.append(list(indices))


def test_an_observer_hears_the_rows() -> None:
    with events.observe(Heard()) as heard:
        for step in TextStream(torch.arange(100), global_batch_size=5, window=19, micro_batch_size=2, rank=0, world_size=2):
            list(step)
    assert heard.rows == [[0, 1], [2]]


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.uint16, torch.int64])
def test_tokens_may_be_stored_small(dtype: torch.dtype) -> None:
    step = next(iter(TextStream(torch.arange(13).to(dtype), global_batch_size=1, window=12, **ONE)))
    assert inputs_of(step) == [list(range(12))]


@pytest.mark.parametrize(
    ("tokens", "settings", "message"),
    [
        (
            torch.arange(100),
            {"global_batch_size": 3, "world_size": 4},
            "each rank must have at least one row, but 3 rows are dealt to 4 ranks",
        ),
        (torch.arange(20), {"global_batch_size": 3}, "must have at least 21 tokens; decrease global_batch_size or window"),
        (torch.arange(100), {"global_batch_size": 0}, "global_batch_size must be at least 1"),
        (torch.arange(100), {"global_batch_size": 3, "micro_batch_size": 0}, "micro_batch_size must be at least 1"),
        (
            torch.rand(100),
            {"global_batch_size": 3},
            "tokens must be integers of shape \\[num_tokens\\], but are torch.float32 of shape \\[100\\]",
        ),
        (torch.ones(10, 10, dtype=torch.int64), {"global_batch_size": 3}, "but are torch.int64 of shape \\[10, 10\\]"),
    ],
)
def test_mistakes_are_refused_before_the_first_step(tokens: Tensor, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextStream(tokens, window=6, **{**ONE, **settings})
