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


def test_a_rank_is_killed_and_the_job_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    code, rows, said = chaos(tmp_path, "F1", "--seed", "0")
    assert code == 0, said
    assert rows["chaos.F1.hora/passed"]["samples"] == [1.0]
    assert set(rows) >= {f"chaos.F1.hora/{measure}" for measure in ("detected_s", "recovered_s", "lost_steps")}


@pytest.mark.parametrize(
    ("words", "said"),
    [(["F99"], 'unknown scenario "F99"; choose from: F1, '), (["F1", "--json", "/no/such/place"], "cannot write /no/such/place")],
)
def test_mistakes_in_the_words_are_said_before_anything_is_started(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", *words]) == 2
    assert said in capsys.readouterr().err
