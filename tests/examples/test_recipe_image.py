"""`hora train image` as a user types it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

HORA = [sys.executable, "-m", "hora"]


def run(words: list[str], directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        [*HORA, "train", "image", *words], cwd=directory, env=environ, capture_output=True, text=True, timeout=100, check=False
    )


def test_two_ranks_leave_everything_and_are_evaluated_by_one(tmp_path: Path) -> None:
    words = [
        "--nodes",
        "1",
        "--gpus",
        "2",
        "--nr",
        "0",
        "--epochs",
        "1",
        "--batch_size",
        "100",
        "--run-dir",
        "run",
        "--json",
        "rows.json",
        "--set",
        "tensorboard=false",
    ]
    done = run(words, tmp_path)
    assert done.returncode == 0, done.stderr
    kept = {path.name for path in (tmp_path / "run").iterdir()}
    assert kept == {"checkpoints", "config.yaml", "curve.png", "job", "logs", "metrics.jsonl"}
    results = {row["what"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert results["image/digits/test accuracy"]["ranks"] == 2
    assert results["image/digits/training speed"]["unit"] == "images/s"
    accuracy = results["image/digits/test accuracy"]["value"]
    assert 0.5 < accuracy <= 1
    evaluated = run(["--evaluate", "--run-dir", "run"], tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr
    found = re.search(r"test loss \d\.\d+, accuracy (\d\.\d+)", evaluated.stderr)
    assert found is not None
    assert float(found[1]) == round(accuracy, 4)
    assert {path.name for path in (tmp_path / "run").iterdir()} == kept
    assert sorted(os.listdir(tmp_path)) == ["rows.json", "run"]
