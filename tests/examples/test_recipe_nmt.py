"""`hora train nmt` as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hora.recipes.nmt.texts import EXCERPT
from hora.recipes.nmt.vocabulary import Vocabularies, WordVocabulary
from hora.recipes.vocabularies import FILE_NAME

HORA = [sys.executable, "-m", "hora"]
TINY = """
data_configs:
  lang_pair: en-de
  train_data: [train.en, train.de]
  valid_data: [valid.en, valid.de]
  vocabularies:
    - {type: word, dict_path: en.txt, max_n_words: 100}
    - {type: word, dict_path: "", max_n_words: -1}
  cache: cache
model_configs: {model: DL4MT, d_word_vec: 8, d_model: 8}
optimizer_configs: {optimizer: adam, learning_rate: 0.001, optimizer_params: ~}
training_configs: {max_epochs: 1, batch_size: 40, valid_batch_size: 10, disp_freq: 2, save_freq: 2, loss_valid_freq: 2, tensorboard: false}
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    for split, count in (("train", 120), ("valid", 10)):
        for language in ("en", "de"):
            lines = (EXCERPT / f"{split}.{language}").read_text(encoding="utf-8").split("\n")[:count]
            (tmp_path / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "en.txt").write_text("I\nTom\nto\n.\n")
    (tmp_path / "a.yaml").write_text(TINY)
    return tmp_path


def leave_unsaved_run(path: Path) -> None:
    """What a run of another configuration leaves that ends before its first checkpoint."""
    (path / "checkpoints").mkdir(parents=True)
    (path / "config.yaml").write_text("another: one\n")
    (path / "metrics.jsonl").write_text('{"step": 1, "epoch": 0, "split": "valid", "perplexity": 1.0}\n')
    vocabulary = WordVocabulary(("another",))
    (path / FILE_NAME).write_text(Vocabularies(vocabulary, vocabulary).to_json(), encoding="utf-8")


def run(words: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*HORA, *words], cwd=directory, env=environ, capture_output=True, text=True, timeout=100, check=False)


def test_command_line_of_njunmt_trains_on_two_ranks(work: Path) -> None:
    words = [
        "train",
        "nmt",
        "--model_name",
        "a",
        "--config_path",
        "a.yaml",
        "--log_path",
        "log",
        "--saveto",
        "save",
        "--reload",
        "--json",
        "rows.json",
    ]
    leave_unsaved_run(work / "save" / "a")
    first = run([*words, "--nproc", "2"], work)
    assert first.returncode == 0, first.stderr
    assert "--reload finds no checkpoint in save/a, so a run begins" in first.stderr
    kept = {path.name for path in (work / "save" / "a").iterdir()}
    assert kept == {"checkpoints", "config.yaml", "curve.png", "job", "logs", "metrics.jsonl", "vocab.json"}
    assert {path.name for path in (work / "log").iterdir()} == {"rank0.log", "rank1.log"}
    rows = [json.loads(line) for line in (work / "save" / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["split"] == "valid"] == [2, 3]
    results = {row["what"]: row for row in json.loads((work / "rows.json").read_text())}
    assert results["nmt/a/training speed"]["ranks"] == 2
    assert results["nmt/a/validation perplexity"]["samples"] == [row["perplexity"] for row in rows if row["split"] == "valid"]
