"""`hora train lm` and `hora demo` as a user types them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hora.recipes.lm.text import EXCERPT

HORA = [sys.executable, "-m", "hora"]
TINY = ["model.hidden_size=8", "data.max_vocabulary=200", "tensorboard=false"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ptb")
    for split, count in (("train", 6000), ("valid", 400), ("test", 300)):
        words = (EXCERPT / f"{split}.txt").read_text(encoding="utf-8").split()[:count]
        (directory / f"ptb.{split}.txt").write_text(" ".join(words) + "\n", encoding="utf-8")
    return directory


def settings(*more: str) -> list[str]:
    return [word for value in (*TINY, *more) for word in ("--set", value)]


def run(command: list[str], directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=directory, env=os.environ | variables, capture_output=True, text=True, timeout=100, check=False)


def rows_of(directory: Path) -> list[dict[str, object]]:
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_texar_command_line_trains_on_two_ranks_and_leaves_everything(texts: Path, tmp_path: Path) -> None:
    words = ["--config", "config_small", "--data_path", str(texts), "--nproc", "2", "--run-dir", "run", "--json", "rows.json"]
    done = run([*HORA, "train", "lm", *words, *settings("epochs=2")], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "epoch 2/2: training perplexity" in done.stderr
    assert "test perplexity" in done.stderr
    kept = {path.name for path in (tmp_path / "run").iterdir()}
    assert kept == {"checkpoints", "config.yaml", "curve.png", "job", "logs", "metrics.jsonl", "vocab.json"}
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {"rank0.log", "rank1.log"}
    results = {row["what"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert results["lm/small/time per epoch"]["ranks"] == 2
    assert [row["perplexity"] for row in rows_of(tmp_path / "run") if row["split"] == "valid"] == results["lm/small/validation perplexity"][
        "samples"
    ]


def test_sigterm_to_the_launcher_saves_and_the_run_can_go_on(texts: Path, tmp_path: Path) -> None:
    command = [*HORA, "train", "lm", "--data", str(texts), "--nproc", "2", "--run-dir", "run", *settings("epochs=500")]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not rows_of(tmp_path / "run"):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert "is saved in run/checkpoints/" in errors
    epoch = rows_of(tmp_path / "run")[-1]["epoch"]
    # One rank with a thread for each core would, beside other tests, be several times slower than with one thread.
    words = ["--resume", "--run-dir", "run", "--set", f"epochs={int(str(epoch)) + 1}"]
    done = run([*HORA, "train", "lm", *words], tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "resumed at step" in done.stderr
    steps = [(row["step"], row["split"]) for row in rows_of(tmp_path / "run")]
    assert len(steps) == len(set(steps))
    assert steps[-1][1] == "test"


def test_mistake_in_the_text_ends_all_ranks_with_its_place(texts: Path, tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_bytes((texts / f"ptb.{split}.txt").read_bytes())
    with (tmp_path / "valid.txt").open("ab") as file:
        file.write(b"caf\xe9\n")
    done = run([*HORA, "train", "lm", "--data", str(tmp_path), "--nproc", "2", "--run-dir", "run", *settings()], tmp_path)
    assert done.returncode == 2
    assert "valid.txt:2: the text must be UTF-8, but byte 4 of the line is 0xe9" in done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_that_torchrun_started_train_together(texts: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["train", "lm", "--data", str(texts), "--run-dir", "run", *settings("epochs=1")]
    done = run([*torchrun, "-m", "hora", *words], tmp_path)
    assert done.returncode == 0, done.stderr
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert json.loads((checkpoint / "manifest.json").read_text())["world_size"] == 2


def test_demo_shows_the_same_curve_for_two_ranks_and_for_one(texts: Path, tmp_path: Path) -> None:
    words = ["--run-dir", "runs", "--json", "curves.json", *settings("epochs=1", f"data.path={texts}")]
    done = run([*HORA, "demo", *words], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    points = json.loads((tmp_path / "curves.json").read_text())
    assert [point["split"] for point in points] == ["train"] * 10 + ["valid", "test"]
    assert "All 12 perplexities agree to 4 significant digits" in done.stdout
    assert "Try next:" in done.stdout
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"2-ranks", "1-rank"}


def test_demo_passes_on_that_a_run_failed(tmp_path: Path) -> None:
    done = run([*HORA, "demo", "--set", "data.max_vocabulary=0"], tmp_path)
    assert done.returncode == 2
    assert "data.max_vocabulary" in done.stderr
    assert os.listdir(tmp_path) == []
