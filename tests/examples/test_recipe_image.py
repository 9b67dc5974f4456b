"""`hora train image` as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_command_line_of_dream_system_trains_on_two_ranks_and_leaves_everything(tmp_path: Path) -> None:
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
    command = [sys.executable, "-m", "hora", "train", "image", *words]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "epoch 1/1: training loss" in done.stderr
    kept = {path.name for path in (tmp_path / "run").iterdir()}
    assert kept == {"checkpoints", "config.yaml", "curve.png", "job", "logs", "metrics.jsonl"}
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {"rank0.log", "rank1.log"}
    results = {row["what"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert results["image/digits/test accuracy"]["ranks"] == 2
    assert results["image/digits/training speed"]["unit"] == "images/s"
    assert 0.5 < results["image/digits/test accuracy"]["value"] <= 1
    assert sorted(os.listdir(tmp_path)) == ["rows.json", "run"]
