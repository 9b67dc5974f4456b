"""`hora chaos` through the real command; that its judges see what is wrong is in unit/diag/chaos."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hora.cli.main import main


def chaos(tmp_path: Path, *words: str) -> tuple[int, dict[str, dict[str, object]], str]:
    file = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "hora", "chaos", *words, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    rows = json.loads(file.read_text()) if file.exists() else []
    return done.returncode, {row["what"]: row for row in rows}, done.stdout + done.stderr


def test_a_fault_strikes_a_job_which_is_judged(tmp_path: Path) -> None:
    """One of the quick ones; ranks that are killed and start anew with the same bits are in `test_launcher_restarts`."""
    code, rows, said = chaos(tmp_path, "F12", "--seed", "0")
    assert code == 0, said
    assert rows["chaos.F12.hora/passed"]["samples"] == [1.0]
    assert rows["chaos.F12.hora/detected_s"]["value"] < 5.0


def test_training_goes_on_where_a_save_is_refused(tmp_path: Path) -> None:
    """Seed 3 is the fault that needs no rights: files that may not grow."""
    code, rows, said = chaos(tmp_path, "F9", "--seed", "3")
    assert code == 0, said
    assert [trial["variant"] for trial in rows["chaos.F9.hora/passed"]["trials"]] == ["short write"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["F99"], 'unknown scenario "F99"; choose from: F1, '), (["F1", "--json", "/no/such/place"], "cannot write /no/such/place")],
)
def test_mistakes_in_the_words_are_said_before_anything_is_started(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", *words]) == 2
    assert said in capsys.readouterr().err
