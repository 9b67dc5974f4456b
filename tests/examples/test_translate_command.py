"""`hora translate` as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nmt_run_kit import WORDS, make_model, make_run

from hora.recipes.nmt.decoding.plain import search_plainly
from hora.recipes.nmt.decoding.rules import Rules
from hora.recipes.nmt.symbols import EOS
from hora.recipes.nmt.vocabulary import WordVocabulary

HORA = [sys.executable, "-m", "hora", "translate"]
TEXT = "a b c\n\nh\na b c\n\u2028 z e f g h i\ni h g f\n"
RULES = ["--beam-size", "4", "--alpha", "0.6", "--max-steps", "8", "--batch-size", "2", "--precision", "float32"]


def run(words: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*HORA, *words], env=variables, capture_output=True, timeout=100, check=False, **options)  # type: ignore[call-overload, no-any-return]


def expected(*seeds: int) -> list[list[str]]:
    vocabulary = WordVocabulary(WORDS)
    models = [make_model(seed).eval() for seed in seeds]
    numbers = [vocabulary.encode(line) for line in TEXT.removesuffix("\n").split("\n")]
    found = [search_plainly(models, [*source, EOS], Rules(4, 0.6, 8, 3)) if source else [] for source in numbers]
    return [[vocabulary.decode(each.symbols) for each in best] or ["", "", ""] for best in found]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("runs")
    make_run(directory / "a", {1: 21})
    make_run(directory / "b", {1: 8})
    (directory / "text").write_text(TEXT, encoding="utf-8")
    return directory


def test_a_text_goes_through_standard_input_and_output(runs: Path) -> None:
    done = run(["--model_path", str(runs / "a"), *RULES], input=TEXT.encode())
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().split("\n") == [best[0] for best in expected(21)] + [""]
    assert b"sentences/s" in done.stderr


def test_two_ranks_write_the_best_of_two_models_together_as_one_does(runs: Path, tmp_path: Path) -> None:
    models = ["--model_path", str(runs / "a"), "--model-path", str(runs / "b" / "checkpoints" / "step-00000001.g0")]
    words = [*models, "--keep_n", "3", "--saveto", "out", "--json", "out.jsonl", "--model_name", "x", "--multi_gpu", *RULES]
    done = run([*words, "--source_path", str(runs / "text"), "--nproc", "2"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    best = expected(21, 8)
    assert len({text for texts in best for text in texts}) > 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.0", "out.1", "out.2", "out.jsonl"]
    for place in range(3):
        assert (tmp_path / f"out.{place}").read_text(encoding="utf-8").split("\n")[:-1] == [texts[place] for texts in best]
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert [row["source"] for row in rows] == TEXT.split("\n")[:-1]
    assert [each["text"] for each in rows[0]["translations"]] == best[0]
    scores = [each["score"] for each in rows[0]["translations"]]
    assert scores == sorted(scores, reverse=True)
    assert rows[1]["translations"] == [{"text": "", "score": 0.0}]
