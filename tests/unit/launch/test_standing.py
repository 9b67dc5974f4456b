"""Whether a job hangs, and who is to blame, from where its ranks stand."""

import math
from dataclasses import replace

import pytest

from hora.launch.standing import Hang, Standing, find_hang, from_text, to_text
from hora.pulse import Doing, Section

BUSY = Standing(1, "beta", 12, "R", Section.STEP, Doing.WORK, 20, 6, 6, "", silent_s=200.0, limit_s=180.0, stopped_limit_s=2.0)
WAITING = replace(BUSY, rank=0, doing=Doing.CALL, begun=7, call="all_reduce #7", silent_s=190.0)
OWN = replace(BUSY, section=Section.EVALUATION, doing=Doing.OWN, limit_s=240.0)


def blamed(*standings: Standing) -> list[int] | None:
    hang = find_hang(standings)
    return None if hang is None else [culprit.rank for culprit in hang.culprits]


def test_standings_survive_the_wire() -> None:
    told = [BUSY, replace(WAITING, limit_s=math.inf, stacks='Thread 0x1\n  File "ä"', debugged=True)]
    assert from_text(to_text(told)) == told


def test_the_rank_that_does_not_wait_is_to_blame() -> None:
    assert find_hang([WAITING, BUSY]) == Hang((BUSY,), 190.0)


def test_a_job_hangs_only_when_all_its_ranks_are_silent() -> None:
    assert blamed(WAITING, replace(BUSY, silent_s=179.0)) is None
    assert blamed(replace(WAITING, silent_s=1.0), BUSY) is None


def test_it_is_the_deadline_of_the_one_waited_for_that_counts() -> None:
    """A long checkpoint of rank 1 is not ended because rank 0, which waits for it, has been silent for long."""
    assert blamed(WAITING, replace(BUSY, section=Section.CHECKPOINT, limit_s=600.0)) is None


def test_a_script_on_its_own_is_left_alone() -> None:
    ages = replace(OWN, silent_s=1e6)
    assert blamed(replace(ages, rank=0), ages) is None


def test_a_script_on_its_own_that_others_wait_for_is_not() -> None:
    assert blamed(replace(WAITING, silent_s=250.0), replace(OWN, silent_s=250.0)) == [1]
    assert blamed(WAITING, OWN) is None


def test_a_deadline_of_the_users_holds_for_a_script_on_its_own() -> None:
    assert blamed(replace(OWN, given=True, limit_s=60.0)) == [1]


def test_ranks_that_wait_for_each_other_are_told_apart_by_their_collectives() -> None:
    behind = replace(WAITING, rank=2, begun=6, call="recv")
    assert blamed(WAITING, behind) == [2]
    assert blamed(WAITING, replace(WAITING, rank=2)) == [0, 2]


def test_a_rank_that_has_left_is_not_asked() -> None:
    left = replace(OWN, section=Section.OUTSIDE, silent_s=0.0, limit_s=math.inf)
    assert blamed(WAITING, BUSY, replace(left, rank=2)) == [1]
    assert blamed(replace(left, silent_s=1e6)) is None


def test_a_stopped_process_is_to_blame_whatever_the_others_do() -> None:
    assert blamed(replace(WAITING, silent_s=0.0), replace(BUSY, silent_s=0.0, state="T", stopped_s=2.0)) == [1]
    assert blamed(replace(BUSY, silent_s=0.0, state="T", stopped_s=1.9)) is None


@pytest.mark.parametrize("standing", [BUSY, replace(BUSY, stopped_s=60.0)])
def test_a_rank_under_a_debugger_does_not_hang(standing: Standing) -> None:
    assert blamed(WAITING, standing) == [1]
    assert blamed(WAITING, replace(standing, debugged=True)) is None


def test_who_is_told_of_as_missing_is_missing_also_where_all_wait() -> None:
    """Ranks 0 and 1 wait for each other in different tensors; rank 2 has nothing to do with it."""
    deadlocked = [
        replace(BUSY, rank=0, doing=Doing.WAIT, missing=(1, 0), note="Missing ranks:"),
        replace(BUSY, rank=1, doing=Doing.WAIT),
        replace(BUSY, rank=2),
    ]
    hang = find_hang(deadlocked)
    assert hang is not None
    assert [culprit.rank for culprit in hang.culprits] == [0, 1]
    assert from_text(to_text(deadlocked)) == deadlocked
