import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hora.cli.main import main


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("b a a\nc a b\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("words", "expected", "covers"),
    [
        ([], {"a": [0, 3], "b": [1, 2], "c": [2, 1]}, "3 of 3 words cover 100.00% of the text (6)"),
        (["--num", "1"], {"a": [0, 3]}, "1 of 3 words cover 50.00%"),
        (["--freq", "2"], {"a": [0, 3], "b": [1, 2]}, "2 of 3 words cover 83.33%"),
        (["--char", "--num", "1"], {"a": [0, 3]}, "1 of 3 characters cover 50.00%"),
    ],
)
def test_dictionary_has_the_most_frequent_first(
    words: list[str], expected: dict[str, list[int]], covers: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vocab", "--file", str(text), *words]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == expected
    assert list(json.loads(told.out)) == list(expected)
    assert covers in told.err
    assert main(["vocab", "--file", str(text), *words, "--saveto", str(tmp_path / "out.json")]) == 0
    assert (tmp_path / "out.json").read_text() == told.out


def test_dictionary_is_utf8_in_any_locale(tmp_path: Path) -> None:
    text, dictionary = tmp_path / "text", '{\n"é": [0, 2],\n"漢": [1, 1]\n}\n'
    text.write_text("é 漢 é\n", encoding="utf-8")
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    command = [sys.executable, "-m", "hora", "vocab", "--file", str(text)]
    result = subprocess.run(command, env=ascii_only, capture_output=True, check=False, timeout=60)
    assert (result.returncode, result.stdout.decode()) == (0, dictionary), result.stderr


def test_several_texts_are_counted_together(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vocab", "--file", str(text), "--file", str(text)]) == 0
    assert json.loads(capsys.readouterr().out)["a"] == [0, 6]


def test_mistakes_are_told(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text("\n")
    for words, fault in (
        (["--file", str(text), "--num", "2", "--freq", "2"], "give one of them"),
        (["--file", str(tmp_path / "gone")], "gone cannot be read"),
        (["--file", str(tmp_path / "empty")], "a dictionary needs words"),
        (["--file", str(text), "--freq", "9"], "a dictionary needs words, but there are none that occur 9 times"),
        (["--file", str(text), "--saveto", str(tmp_path / "no" / "out")], "--saveto cannot write"),
    ):
        assert main(["vocab", *words]) == 2
        assert fault in capsys.readouterr().err


def test_a_text_that_is_read_is_not_written_over(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = text.read_text()
    assert main(["vocab", "--file", str(text), "--saveto", str(tmp_path / "." / "text")]) == 2
    assert "--saveto would write over" in capsys.readouterr().err
    assert text.read_text() == before
