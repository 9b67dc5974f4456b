"""What people read of a hang."""

import os
from dataclasses import replace

import torch

from hora.launch.hang_report import main_frames, summarize, user_frames, write_out
from hora.launch.standing import Hang, Standing
from hora.pulse import Doing, Section

STACKS = f"""\
Thread 0x00007f84a5a246c0 (most recent call first):
  File "{os.__file__}", line 331 in wait

Current thread 0x00007f84c5e1fb80 (most recent call first):
  File "{torch.__file__}", line 12 in forward
  File "/home/me/my model.py", line 28 in spin
  File "/home/me/train.py", line 31 in <module>
"""
BUSY = Standing(1, "beta", 12, "R", Section.STEP, Doing.WORK, 20, 6, 6, "", silent_s=200.0, limit_s=180.0, stacks=STACKS)
WAITING = replace(BUSY, rank=0, state="S", doing=Doing.CALL, begun=7, call="all_reduce #7")
MANY = [WAITING, BUSY, *(replace(WAITING, rank=rank) for rank in range(2, 64))]


def test_frames_are_those_of_the_main_thread_the_users_own_if_there_are_any() -> None:
    assert [str(frame) for frame in user_frames(STACKS)] == ["my model.py:28 in spin", "train.py:31 in <module>"]
    assert [frame.name for frame in main_frames(STACKS)] == ["forward", "spin", "<module>"]
    assert [frame.name for frame in user_frames(STACKS.replace("/home/me", "/x/site-packages"))] == ["forward", "spin", "<module>"]
    assert user_frames("") == []


def test_a_hang_fits_on_a_screen() -> None:
    lines = summarize(Hang((BUSY,), 199.6), MANY, "/logs/hang-report.txt").splitlines()
    assert lines == [
        "the job hangs: rank 1 is missing, and no rank has got on for 200 s (deadline 180 s); all ranks are ended",
        "  rank 1 on beta (process 12): running in step 21 since the start, last finished #6, silent for 200.0 s",
        "    my model.py:28 in spin",
        "    train.py:31 in <module>",
        "  ranks 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and 47 more: waiting in all_reduce #7, at my model.py:28 in spin",
        "stacks of all ranks: /logs/hang-report.txt; --deadline step=SECONDS, or =off, where this is no hang",
    ]


def test_many_culprits_in_many_places_fit_on_a_screen() -> None:
    culprits = tuple(replace(BUSY, rank=rank) for rank in range(64))
    others = [replace(WAITING, rank=rank, call=f"recv #{rank}") for rank in range(64, 128)]
    assert len(summarize(Hang(culprits, 1.0), [*culprits, *others], "x").splitlines()) <= 30


def test_a_stopped_rank_is_called_that() -> None:
    stopped = replace(BUSY, state="T", stopped_s=2.5, stopped_limit_s=2.0, stacks="", section=Section.EVALUATION, doing=Doing.OWN)
    text = summarize(Hang((stopped,), 2.5), [WAITING, stopped], "x")
    assert text.startswith("rank 1 is stopped, for 2.5 s now")
    assert "stopped after step 20 since the start" in text
    assert "--deadline" not in text


def test_the_file_has_all_stacks_or_says_why_not() -> None:
    text = write_out(Hang((BUSY,), 200.0), [WAITING, replace(BUSY, state="D", stacks="")])
    assert STACKS.rstrip() in text
    assert "(none: the process is in the kernel" in text


def test_the_file_has_an_end() -> None:
    assert len(write_out(Hang((BUSY,), 200.0), [replace(BUSY, stacks="x" * 10_000)] * 100)) < 700_000
