import os
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up_records import step

from hora import env
from hora.diag.prove.records import END, StepRecord, write_record
from hora.diag.prove.request import Request
from hora.diag.prove.run import SITE, Ended, ProveError, RunFailed, Runner, Start, run_words
from hora.errors import ConfigError


def runner(tmp_path: Path, starter: Callable[[Start], Ended], **more) -> Runner:
    return Runner(Request(("train.py", "{ranks}"), directory=tmp_path / "prove", **more), starter, {"PYTHONPATH": "mine", "OTHER": "1"})


def recording(*counts: int, exit_code: int | None = 0, through: bool = True, **notes) -> Callable[[Start], Ended]:
    def start(start: Start) -> Ended:
        directory = Path(start.environ[env.PROVE])
        for rank, count in enumerate(counts):
            for number in range(count + 1):
                write_record(directory, step(number, rank, **notes))
            if through:
                write_record(directory, StepRecord(rank, len(counts), END))
        return Ended(exit_code, "the last line")

    return start


def test_run_gets_what_it_needs_and_keeps_what_it_had(tmp_path: Path) -> None:
    seen: list[Start] = []

    def start(start: Start) -> Ended:
        seen.append(start)
        return recording(3, 3)(start)

    run = runner(tmp_path, start).run(2, steps=3, without=("float64", "dropout"))
    (started,) = seen
    assert (run.ranks, run.steps) == (2, 3)
    assert list(started.words) == ["train.py", "2"]
    assert started.environ["OTHER"] == "1"
    assert started.environ["PYTHONPATH"].split(os.pathsep) == [str(SITE), "mine"]
    assert (started.environ[env.PROVE_STEPS], started.environ[env.PROVE_WITHOUT]) == ("3", "float64,dropout")
    assert (SITE / "sitecustomize.py").exists()


def test_directory_that_is_in_use_is_refused(tmp_path: Path) -> None:
    prover = runner(tmp_path, recording(2), steps=2)
    prover.run(1)
    with pytest.raises(ConfigError, match="--dir must be a directory that no proof was left in"):
        prover.run(1)
    prover.run(1, again=True)  # a run of its own


def test_failures_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(
        RunFailed, match=r"the run on 2 ranks failed with exit code 3; steps recorded: rank 0 1, rank 1 0(.|\n)*the last line"
    ):
        runner(tmp_path / "a", recording(1, 0, exit_code=3, through=False)).run(2)
    with pytest.raises(RunFailed, match="had not ended after its time; steps recorded: rank 0 5, rank 1 2"):
        runner(tmp_path / "b", recording(5, 2, exit_code=None, through=False)).run(2)
    with pytest.raises(RunFailed, match="made no step of a torch optimizer"):
        runner(tmp_path / "c", recording()).run(2)
    with pytest.raises(RunFailed, match="as many ranks as --ranks says, but 1 recorded steps"):
        runner(tmp_path / "d", recording(4)).run(2)


def test_script_that_ends_badly_after_the_last_step_has_been_recorded_all_the_same(tmp_path: Path) -> None:
    assert runner(tmp_path, recording(2, 2, exit_code=134), steps=2).run(2).steps == 2


def test_exact_needs_a_session_in_exact_mode(tmp_path: Path) -> None:
    with pytest.raises(ProveError, match=r"call hora.init\(\)"):
        runner(tmp_path / "a", recording(2, exact=False), exact=True).run(1)
    assert runner(tmp_path / "b", recording(2, exact=True), exact=True).run(1).steps == 2


def test_ranks_are_started_by_horas_launcher_or_by_the_users_under_it(tmp_path: Path) -> None:
    start = Start(["train.py", "-x"], 3, False, True, None, {}, tmp_path, 1.0)
    command = run_words(start)
    assert command[-2:] == ["train.py", "-x"]
    assert command[command.index("-np") + 1] == "3"
    assert "--exact" in command
    launched = run_words(Start(["train.py", "-x"], 3, False, False, "torchrun -n 3", {}, tmp_path, 1.0))
    assert launched[launched.index("-np") + 1] == "1"
    assert launched[-5:] == ["torchrun", "-n", "3", "train.py", "-x"]
    assert {"--no-python", "RANK", env.RENDEZVOUS} <= set(launched)
