"""Ranks that die, fail or stay away while others negotiate with them: named, soon, on all ranks."""

import logging
import os
import signal
import time

import pytest
import torch

import hora
import hora.hvd as hvd


def told(call) -> list:
    """What a call raises, and after how long."""
    begun = time.monotonic()
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - begun]
    return ["nothing", "", time.monotonic() - begun]


def body_loses_a_rank(lost: int) -> list:
    hvd.init()
    hvd.allreduce(torch.ones(1))
    if hora.rank() == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    found = told(lambda: hvd.allreduce(torch.ones(1), name="x"))
    hvd.shutdown()
    return found


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_killed_is_named(spawn_ranks, lost):
    ranks = spawn_ranks(3, body_loses_a_rank, lost=lost)
    for outcome in ranks.wait(but=lost):
        assert outcome.kind == "passed", outcome
        kind, text, seconds = outcome.result
        assert kind == "HorovodInternalError"
        assert text.startswith("Horovod has been shut down.")
        assert f"Rank {lost} (process" in text
        assert seconds < 8


def body_fails() -> list:
    hvd.init()
    if hvd.rank() == 1:
        try:
            raise KeyError("no such column")
        except KeyError:
            hvd.shutdown()
        return ["left", "", 0.0]
    found = told(lambda: hvd.allreduce(torch.ones(1), name="x"))
    hvd.shutdown()
    return found


def test_the_exception_that_drives_a_rank_out_is_told_to_the_others(spawn_ranks):
    first, second = spawn_ranks(2, body_fails).wait()
    assert second.result[0] == "left"
    assert "caused by an exception on rank 1: KeyError: 'no such column'" in first.result[1]


def body_stays_away(late: int) -> list:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("hora").addHandler(Keep())
    hvd.init()
    if hvd.rank() == late:
        handle = hvd.allgather_async(torch.ones(1), name="wanted")  # by the same name something else
        hvd.poll(handle)
        found = told(lambda: hvd.synchronize(handle))
    else:
        found = told(lambda: hvd.grouped_allreduce([torch.ones(1)] * 2, name="wanted"))
    hvd.shutdown()
    return [*found, lines]


STALLS = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.3", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1.2"}


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_stay_away_are_warned_of_and_then_all_end(spawn_ranks, late):
    outcomes = spawn_ranks(3, body_stays_away, environ=STALLS, late=late).wait()
    lines = "\n".join(outcomes[0].result[3])
    assert "waiting for remainder of ranks for more than 0.3 seconds" in lines
    others = [rank for rank in range(3) if rank != late]
    missing = {late: "allreduce.wanted"} | dict.fromkeys(others, "allgather.wanted")
    assert all(f"\n{rank}: [{name}]" in lines for rank, name in missing.items())
    for outcome in outcomes:
        kind, text, seconds, _ = outcome.result
        assert kind == "HorovodInternalError"
        assert all(f"{rank}: [{name}]" in text for rank, name in missing.items())
        assert 0.9 < seconds < 6


def body_is_not_watched() -> list:
    hvd.init()
    if hvd.rank() == 1:
        time.sleep(1.0)
    found = told(lambda: hvd.allreduce(torch.ones(1), name="x"))
    hvd.shutdown()
    return found


def test_a_stall_that_is_not_watched_is_waited_for(spawn_ranks):
    environ = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0.2", "HOROVOD_STALL_CHECK_DISABLE": "1"}
    assert [outcome.result[0] for outcome in spawn_ranks(2, body_is_not_watched, environ=environ).wait()] == ["nothing"] * 2


def body_writes_a_timeline(path: str) -> list:
    import json
    from pathlib import Path

    hvd.init()
    hvd.start_timeline(path, mark_cycles=True)
    sizes = []
    for step in range(5):
        hvd.allreduce(torch.ones(2, 3), name=f"t{step}")
        hvd.barrier()
        if hvd.rank() == 0:
            sizes.append(len(json.loads(Path(path).read_text())))  # whole at every moment
    hvd.stop_timeline()
    hvd.barrier()  # nobody speaks of the next one before
    hvd.allreduce(torch.ones(1), name="unseen")
    hvd.shutdown()
    return sizes


def test_a_timeline_is_whole_at_every_moment(spawn_ranks, tmp_path):
    path = tmp_path / "timeline.json"
    first, _ = spawn_ranks(2, body_writes_a_timeline, path=str(path)).wait()
    assert first.result == sorted(set(first.result))
    text = path.read_text()
    assert "allreduce.t4" in text
    assert '"CYCLE_START"' in text
    assert "[[2, 3]]" in text
    assert "unseen" not in text
