"""Who is slow, and why, from what ranks say of their steps."""

from dataclasses import replace

import pytest

from hora.launch.stragglers import Straggler, Stragglers, find_slowest
from hora.pulse import Doing, Section, Words

WORDS = Words(1, Section.STEP, Doing.WORK, 20, 0, 0, 0, "", 0.0, 0.0, 1, 300.0)
# What a rank takes itself in a step, and what of it is waiting for data, in seconds.
QUICK, SLOW, STARVED = (0.01, 0.001), (0.03, 0.001), (0.03, 0.02)


def train(stragglers: Stragglers, ranks: list[tuple[float, float]], seconds: int, begin: int = 0) -> list[Straggler]:
    """Ranks that leave each step together; what is said in so many seconds, looked at once a second."""
    step_s = max(own_s for own_s, _ in ranks)
    told = []
    for second in range(begin, begin + seconds):
        steps = round(second / step_s)
        words = {
            rank: replace(WORDS, steps=steps, waited_s=steps * (step_s - own_s), data_s=steps * data_s)
            for rank, (own_s, data_s) in enumerate(ranks)
        }
        told += [straggler] if (straggler := stragglers.note(words, float(second))) else []
    return told


@pytest.mark.parametrize(("slow", "cause"), [(SLOW, "computing"), (STARVED, "waiting for data")])
def test_a_slow_rank_is_told_of_once_with_its_cause(slow: tuple[float, float], cause: str) -> None:
    (straggler,) = train(Stragglers(), [QUICK, QUICK, slow], 60)
    assert straggler.rank == 2
    assert straggler.own_s == pytest.approx(0.03, rel=0.05)
    assert straggler.others_s == pytest.approx(0.01, rel=0.15)
    assert str(straggler).startswith("rank 2 is slow: 30.3 ms a step of its own")
    assert f"the difference is {cause}" in str(straggler)


def test_ranks_that_take_turns_are_not_slow() -> None:
    stragglers = Stragglers()
    told = []
    for turn in range(10):
        ranks = [QUICK, QUICK]
        ranks[turn % 2] = SLOW
        told += train(stragglers, ranks, 3, begin=3 * turn)
    assert told == []


def test_ranks_much_alike_are_not_slow() -> None:
    assert find_slowest({0: (0.010, 0.0), 1: (0.019, 0.0)}) is None
    assert find_slowest({0: (0.010, 0.0), 1: (0.021, 0.0)}) == Straggler(1, 0.021, 0.010, 0.0)


def test_tiny_steps_are_not_compared() -> None:
    assert find_slowest({0: (0.0001, 0.0), 1: (0.001, 0.0)}) is None


def test_a_rank_alone_is_compared_with_nobody() -> None:
    assert train(Stragglers(), [SLOW], 60) == []


def test_ranks_that_have_joined_anew_are_compared_from_then_on() -> None:
    stragglers = Stragglers()
    train(stragglers, [QUICK, QUICK], 30)
    assert len(train(stragglers, [QUICK, SLOW], 30)) == 1


@pytest.mark.parametrize("begin_s", [0.0, 0.7, 1.3, 1.9])
def test_a_rank_that_becomes_three_times_as_slow_is_told_of_within_20_steps(begin_s: float) -> None:
    """Steps of 0.2 s, of 0.6 s from some moment on; looks twice a second, as the launcher's."""
    stragglers, begin_s = Stragglers(), 10.0 + begin_s
    for look in range(60):
        now = look / 2
        slow = max(0.0, now - begin_s)
        steps = int((now - slow) / 0.2) + int(slow / 0.6)
        words = {rank: replace(WORDS, steps=steps, waited_s=0.0 if rank else 2 / 3 * slow) for rank in (0, 1)}
        if stragglers.note(words, now):
            assert 0 < slow / 0.6 <= 20
            return
    raise AssertionError("nobody was told of")
