"""Silences of ranks on a clock of the test's."""

from dataclasses import replace

from hora.launch.deadlines import Deadlines
from hora.launch.standing import Standing
from hora.launch.watch import LOOK_S, Sight, Watch
from hora.pulse import Doing, Section, Words

WORDS = Words(1, Section.STEP, Doing.WORK, 20, 7, 6, 7, "all_reduce", 0.0, 0.0, 11, 300.0)


class Looks:
    """A watch that is given a look every `LOOK_S`."""

    def __init__(self, deadlines: str = "stopped=2") -> None:
        self.watch = Watch(Deadlines.read(deadlines), "alpha")
        self.now = 50.0
        self.watch.note([], self.now)

    def pass_time(self, seconds: float, words: Words | None = WORDS, state: str = "S", *, every_s: float = LOOK_S) -> Standing:
        """The standing of rank 0 after so many seconds of looking at it."""
        for _ in range(round(seconds / every_s)):
            self.now += every_s
            self.watch.note([Sight(0, 11, state, words)], self.now)
        (standing,) = self.watch.standings({0: "stacks"})
        return standing


def test_a_silence_begins_with_the_last_word() -> None:
    looks = Looks()
    assert looks.pass_time(10.0).silent_s == 10.0 - LOOK_S
    assert looks.pass_time(LOOK_S, replace(WORDS, count=2)).silent_s == 0.0
    assert looks.pass_time(3.0, replace(WORDS, count=2)).silent_s == 3.0


def test_a_standing_says_what_the_rank_said() -> None:
    standing = Looks().pass_time(1.0)
    assert (standing.rank, standing.host, standing.pid, standing.state, standing.stacks) == (0, "alpha", 11, "S", "stacks")
    assert (standing.section, standing.doing, standing.steps, standing.call) == (Section.STEP, Doing.WORK, 20, "all_reduce #7")
    assert (standing.begun, standing.finished, standing.limit_s, standing.stopped_limit_s) == (7, 6, 180.0, 2.0)


def test_a_collective_that_has_ended_is_not_told_of() -> None:
    assert Looks().pass_time(1.0, replace(WORDS, kind="", finished=7)).call == ""


def test_the_clock_stands_while_nobody_looks() -> None:
    """The launcher was stopped, or got no turn: its ranks may have been, too."""
    looks = Looks()
    looks.pass_time(1.0)
    standing = looks.pass_time(3600.0, every_s=3600.0)
    assert standing.silent_s <= LOOK_S + 2 * LOOK_S


def test_a_long_silence_that_ended_well_is_learnt_from() -> None:
    looks = Looks()
    looks.pass_time(50.0)
    assert looks.pass_time(LOOK_S, replace(WORDS, count=2)).limit_s == 500.0


def test_what_a_script_takes_on_its_own_is_not() -> None:
    looks = Looks()
    looks.pass_time(100.0, replace(WORDS, section=Section.EVALUATION, doing=Doing.OWN))
    assert looks.pass_time(LOOK_S, replace(WORDS, count=2)).limit_s == 180.0


def test_a_process_is_stopped_since_it_was_first_seen_so() -> None:
    looks = Looks()
    assert not looks.pass_time(2.0, state="T").stopped
    assert looks.pass_time(LOOK_S, state="T").stopped
    assert looks.pass_time(LOOK_S, state="S").stopped_s == 0.0


def test_a_rank_halted_by_a_debugger_is_not_stopped() -> None:
    assert looks_stopped("t") is False
    assert looks_stopped("T") is True


def looks_stopped(state: str) -> bool:
    return Looks().pass_time(60.0, state=state).stopped


def test_a_rank_that_has_said_nothing_is_watched_from_its_start_if_that_has_a_deadline() -> None:
    assert not Looks().pass_time(5.0, None).watched
    standing = Looks("start=4").pass_time(5.0, None)
    assert (standing.watched, standing.given, standing.limit_s) == (True, True, 4.0)
    assert standing.silent_s > 4.0


def test_a_node_is_under_way_when_all_its_ranks_have_ended_a_step() -> None:
    watch = Looks().watch
    assert not watch.under_way
    watch.note([Sight(0, 11, "S", WORDS), Sight(1, 12, "S", replace(WORDS, steps=0))], 60.0)
    assert not watch.under_way
    watch.note([Sight(0, 11, "S", WORDS), Sight(1, 12, "S", None)], 61.0)
    assert not watch.under_way
    watch.note([Sight(0, 11, "S", WORDS), Sight(1, 12, "S", replace(WORDS, steps=1))], 62.0)
    assert watch.under_way
