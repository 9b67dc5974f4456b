"""Hora's launcher beside torchrun, in turns in one run: `hora bench launch` measures it in earnest."""

from pathlib import Path

import pytest

from hora.diag.bench import launch


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORA_STATE_DIR", str(tmp_path / "state"))


def in_turns(source: str, rounds: int) -> tuple[float, float]:
    """Seconds that the job took in all rounds together, under Hora and under torchrun."""
    pairs = [tuple(launch.run_job(launch.LAUNCHERS[name], source) for name in ("hora run", "torchrun")) for _ in range(rounds)]
    ours, theirs = map(sum, zip(*pairs, strict=True))
    return ours, theirs


def test_the_launcher_itself_costs_a_fraction_of_torchruns() -> None:
    ours, theirs = in_turns("pass\n", rounds=1)
    assert ours < theirs / 3


@pytest.mark.slow
def test_a_gloo_job_takes_less_time_than_under_torchrun() -> None:
    ours, theirs = in_turns(launch.ALL_REDUCE, rounds=2)
    assert ours < theirs
