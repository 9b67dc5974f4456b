import json
import subprocess
import sys
from pathlib import Path

import pytest

from hora.cli.main import main


@pytest.mark.parametrize("words", [["--help"], ["--ranks", "1", "train.py"], ["no-such-script.py"], ["--steps", "0", __file__]])
def test_help_and_mistakes_are_answered_without_torch(words: list[str]) -> None:
    program = f"import sys, json\nfrom hora.cli.main import main\ncode = main({['prove', *words]!r})\n"
    program += "print(json.dumps([code, 'torch' in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout.splitlines()[-1]) == [0 if words == ["--help"] else 2, False], done.stderr


def test_mistakes_start_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit(9)")
    assert main(["prove", "--ranks", "1,3", "train.py", "{64/ranks}"]) == 2
    assert "{64/ranks} must be a whole number for each number of ranks, but 64/3 is none" in capsys.readouterr().err
    assert main(["prove", "--launcher", "torchrun", "--exact", "train.py"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
