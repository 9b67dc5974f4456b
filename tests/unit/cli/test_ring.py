import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hora.cli.main import main


def test_steps_are_lines_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ring", "--ranks", "3"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["step", "rank", "sends", "receives", "holds,", "by", "chunk"]
    assert len(shown) == 1 + 4 * 3 + 1
    assert shown[-1].startswith("Each rank has sent 4 chunks of 1/3 of the data: 2 x 2/3 = 1.33 times the data.")


def test_a_rank_alone_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ring", "--ranks", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "A rank alone has nothing to send."


def test_picture_and_schedule_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ring", "--out", str(tmp_path / "ring.svg"), "--json", str(tmp_path / "ring.json")]) == 0
    assert ET.parse(tmp_path / "ring.svg").getroot().get("role") == "img"
    assert len(json.loads((tmp_path / "ring.json").read_text())["steps"]) == 6
    assert sorted(os.listdir(tmp_path)) == ["ring.json", "ring.svg"]
    assert f"wrote {tmp_path / 'ring.svg'}" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", ["0", "-1", "65"])
def test_numbers_of_ranks_that_cannot_be_shown_are_refused(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ring", "--ranks", ranks]) == 2
    assert capsys.readouterr() == ("", f"hora: --ranks must be from 1 to 64, but is {ranks} instead\n")


@pytest.mark.parametrize("option", ["--out", "--json"])
@pytest.mark.parametrize(
    ("place", "reason"), [("missing/ring", "No such file or directory"), ("folder", "Is a directory"), ("file/ring", "Not a directory")]
)
def test_a_file_that_cannot_be_written_is_an_error(
    option: str, place: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert main(["ring", option, str(tmp_path / place)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"hora: cannot write {tmp_path / place}: {reason}; name a file in a directory that exists and may be written\n"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_torch_is_not_loaded(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom hora.cli.main import main\n"
        f"code = main(['ring', '--out', {str(tmp_path / 'ring.svg')!r}])\nsys.exit(code or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL, timeout=60)
