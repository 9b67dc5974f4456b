"""How long ranks may be silent: what the user said, what was learnt, and what nobody is ended for."""

import math
from dataclasses import replace

import pytest

from hora.errors import ConfigError
from hora.launch.deadlines import Deadlines
from hora.pulse import Doing, Section, Words

WORDS = Words(5, Section.STEP, Doing.WORK, 20, 0, 0, 0, "", 0.0, 0.0, 1, 300.0)


def limit(section: Section, doing: Doing, longest_s: float = 0.0, timeout_s: float = 300.0, given: str = "") -> float:
    deadlines = Deadlines.read(given) if given else Deadlines()
    return deadlines.limit_s(replace(WORDS, section=section, doing=doing, timeout_s=timeout_s), {section: longest_s})


def test_words_of_the_user_are_read() -> None:
    deadlines = Deadlines.read("step=60,checkpoint=off,stopped=1.5")
    assert deadlines.given == {"step": 60.0, "checkpoint": math.inf, "stopped": 1.5}
    assert deadlines.stopped_s == 1.5
    assert deadlines.given_for(Section.STEP) == 60.0
    assert deadlines.given_for(Section.EVALUATION) is None


def test_off_is_none_at_all() -> None:
    deadlines = Deadlines.read("off")
    assert deadlines.stopped_s == math.inf
    assert all(deadlines.given_for(section) == math.inf for section in Section if section is not Section.OUTSIDE)


@pytest.mark.parametrize("text", ["", "step", "step=", "step=0", "step=-1", "step=nan", "step=inf", "steps=3", "step=3;start=4", "60"])
def test_other_words_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--deadline must read step=60"):
        Deadlines.read(text)


def test_all_wrong_words_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"'stop' is none of .*; step must be a number"):
        Deadlines.read("stop=3,step=x")


@pytest.mark.parametrize(("longest_s", "expected"), [(0.0, 180.0), (17.0, 180.0), (60.0, 600.0)])
def test_a_step_may_take_ten_times_as_long_as_any_before_and_minutes_in_any_case(longest_s: float, expected: float) -> None:
    assert limit(Section.STEP, Doing.WORK, longest_s) == expected


def test_compiling_in_the_first_steps_takes_its_time() -> None:
    assert limit(Section.START, Doing.WORK) == 1800.0


def test_a_step_may_compile_once_more() -> None:
    assert Deadlines().limit_s(WORDS, {Section.STEP: 1.0, Section.START: 100.0}) == 300.0


def test_a_rank_that_waits_is_waited_for_as_long_as_its_collectives_allow() -> None:
    assert limit(Section.START, Doing.CALL) == 240.0
    assert limit(Section.EVALUATION, Doing.CALL, timeout_s=3600.0) == 2880.0
    assert limit(Section.STEP, Doing.WAIT, longest_s=100.0) == 240.0


@pytest.mark.parametrize("doing", [Doing.OWN, Doing.DATA])
def test_code_of_the_script_may_take_as_long_as_collectives_allow(doing: Doing) -> None:
    assert limit(Section.EVALUATION, doing) == 240.0
    assert limit(Section.EVALUATION, doing, timeout_s=7200.0) == 5760.0


def test_what_the_user_said_holds_whatever_was_learnt() -> None:
    assert limit(Section.STEP, Doing.WORK, longest_s=100.0, given="step=60") == 60.0
    assert limit(Section.STEP, Doing.WAIT, longest_s=100.0, given="step=600") == 600.0


def test_who_is_in_no_job_has_no_deadline() -> None:
    assert limit(Section.OUTSIDE, Doing.OWN) == math.inf


def test_a_deadline_of_a_step_holds_from_the_second_step_on() -> None:
    """The first belongs to the start, whatever was said of steps; the next nine do unless something was."""
    first, second = replace(WORDS, section=Section.START, steps=0), replace(WORDS, steps=1)
    assert Deadlines().limit_s(second, {}) == 1800.0
    assert Deadlines.read("step=5").limit_s(first, {}) == 1800.0
    assert Deadlines.read("step=5").limit_s(second, {}) == 5.0
    assert Deadlines.read("start=60").limit_s(second, {}) == 60.0
    assert Deadlines.read("start=60,step=5").limit_s(second, {}) == 5.0
    assert Deadlines.read("start=60").limit_s(WORDS, {}) == 180.0


def test_between_the_first_steps_what_was_said_of_evaluation_holds() -> None:
    between = replace(WORDS, section=Section.EVALUATION, doing=Doing.OWN, steps=1)
    assert Deadlines.read("step=5").limit_s(between, {}) == 240.0
    assert Deadlines.read("step=5,evaluation=7").limit_s(between, {}) == 7.0
    assert not Deadlines.read("step=5").given_to(between)
