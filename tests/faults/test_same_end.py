"""A rank that cannot go on ends the step on all ranks, with its reason, at once and not at the deadline."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import hora
from hora.errors import CollectiveMismatch, PeerLost

DEADLINE_S = 60.0
PROMPT_S = 15.0
"""Within what time the others must know: a few heartbeats, much slack for a busy machine, and far from the deadline."""


def train(num_steps: int, fail_at: int = -1, error: Exception | None = None) -> list:
    model = nn.Linear(4, 1)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(num_steps):
        for inputs in optimizer.micro_batches([torch.ones(2, 4)]):
            if step == fail_at and error is not None:
                raise error
            optimizer.backward(model(inputs).sum(), weight=2)
        optimizer.step()
    return []


def body_whose_rank_1_fails(kind: str) -> list:
    errors = {"raises": ValueError("no such word"), "runs out of memory": torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB")}
    begun = time.monotonic()
    try:
        return train(6, fail_at=3 if hora.rank() == 1 else -1, error=errors[kind])
    except Exception as error:
        if hora.rank() == 1:
            hora.shutdown()  # as at the end of the process, or in the user's `finally`
        return [type(error).__name__, str(error), time.monotonic() - begun]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("raises", "has ended with ValueError: no such word"), ("runs out of memory", "has ended with OutOfMemoryError: CUDA out of memory.")],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_failure_of_a_rank_is_the_reason_on_all(spawn_ranks, world_size, kind, reason):
    outcomes = spawn_ranks(world_size, body_whose_rank_1_fails, init={"timeout_s": DEADLINE_S}, kind=kind).wait()
    for rank, outcome in enumerate(outcomes):
        assert outcome.kind == "passed", outcome
        name, text, seconds = outcome.result
        if rank != 1:
            assert name == PeerLost.__name__
            assert f"rank {rank} lost rank 1" in text
            assert f"Rank 1 {reason}" in text
            assert "it last finished #" in text
        assert seconds < PROMPT_S


def body_whose_rank_1_has_less_data(then: str) -> list:
    begun = time.monotonic()
    try:
        train(3 if hora.rank() == 1 else 4)
        if then == "leaves":
            hora.shutdown()
        else:
            hora.all_reduce(torch.ones(2))
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - begun]
    return ["nothing", "", time.monotonic() - begun]


def test_rank_that_runs_out_of_data_and_leaves_is_named(spawn_ranks):
    first, second = spawn_ranks(2, body_whose_rank_1_has_less_data, init={"timeout_s": DEADLINE_S}, then="leaves").wait()
    name, text, seconds = first.result
    assert (name, second.result[0]) == (PeerLost.__name__, "nothing")
    assert "Rank 1 has ended or called hora.shutdown" in text
    assert seconds < PROMPT_S


def test_rank_that_runs_out_of_data_and_evaluates_is_named_on_all(spawn_ranks):
    for outcome in spawn_ranks(2, body_whose_rank_1_has_less_data, init={"timeout_s": DEADLINE_S}, then="evaluates").wait():
        name, text, seconds = outcome.result
        assert name == CollectiveMismatch.__name__
        assert "rank 0 is about to sum update 3 of model" in text
        assert "rank 1 is about to all_reduce float32 [2] sum" in text
        assert seconds < PROMPT_S


SCRIPT = """
import hora, torch
hora.init(timeout_s=60)
model = torch.nn.Linear(4, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for step in range(5):
    for inputs in optimizer.micro_batches([torch.ones(2, 4)]):
        if step == 2 and hora.rank() == 1:
            raise KeyError("the label of sample 17")
        optimizer.backward(model(inputs).sum(), weight=2)
    optimizer.step()
"""


def test_exception_that_ends_a_process_is_the_reason_on_the_others(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    meeting = (tmp_path / "meeting").as_uri()
    text = SCRIPT.replace(
        "timeout_s=60", f"timeout_s=60, init_method={meeting!r}, rank=int(__import__('os').environ['NUMBER']), world_size=2"
    )
    script.write_text(text, encoding="utf-8")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "NUMBER": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert "KeyError: 'the label of sample 17'" in said[1]
    assert "PeerLost: rank 0 lost rank 1" in said[0]
    assert "Rank 1 has ended with KeyError: 'the label of sample 17'" in said[0]
    assert [rank.returncode for rank in ranks] == [1, 1]
