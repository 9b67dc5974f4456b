import os
from pathlib import Path

import pytest

import hora.launch.job
from hora import env
from hora.cli.main import main
from hora.diag.output import check_files
from hora.errors import ConfigError
from hora.launch.command import command
from hora.launch.console import run_command
from hora.launch.options import LaunchOptions
from hora.launch.report_words import ReportWords, require_writable


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[LaunchOptions]:
    options: list[LaunchOptions] = []
    monkeypatch.setattr(hora.launch.job, "launch", lambda given: options.append(given) or 7)
    return options


def test_words_reach_the_ranks_as_variables(asked: list[LaunchOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--report", "--report-json", "r.json", "--trace", str(tmp_path / "t.json"), "-x", "A=1", "train.py", "--report"]
    assert run_command(command, words, name="hora run") == 7
    (options,) = asked
    assert options.args == ("--report",)
    wanted = {env.REPORT: "1", env.REPORT_JSON: str(tmp_path / "r.json"), env.TRACE: str(tmp_path / "t.json")}
    assert options.exports == {"A": "1", **wanted}
    assert ReportWords.from_env(wanted) == ReportWords(True, tmp_path / "r.json", tmp_path / "t.json")
    assert not ReportWords.from_env({}).wanted


@pytest.mark.parametrize("word", ["--report-json", "--trace"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_started(
    asked: list[LaunchOptions], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "missing" / "file.json", tmp_path):
        assert run_command(command, [word, str(path), "train.py"], name="hora run") == 2
        assert f"{word} cannot write {path}; name a file in a directory that exists" in capsys.readouterr().err
    assert asked == []
    # The file is written by rank 0, on node 0.
    missing = str(tmp_path / "missing" / "file.json")
    assert run_command(command, ["--nnodes", "2", "--node-rank", "1", word, missing, "train.py"], name="hora run") == 7


def test_what_is_written_to_may_lie_where_nothing_else_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /dev/null and /dev/stdout do for all but root."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "said").symlink_to("/proc/self/fd/0")
    (tmp_path / "closed").symlink_to("/proc/self/fd/987654")
    monkeypatch.setattr(os, "access", lambda path, _: not Path(path).is_dir())
    for name in ("pipe", "said"):
        require_writable("--json", tmp_path / name)
    for name in ("new", "closed", "."):
        with pytest.raises(ConfigError, match="--json cannot write"):
            require_writable("--json", tmp_path / name)


def test_require_files_names_the_word(tmp_path: Path) -> None:
    ReportWords(True, tmp_path / "r.json", tmp_path / "t.json").require_files()
    with pytest.raises(ConfigError, match="--trace cannot write"):
        ReportWords(trace=tmp_path / "a" / "b").require_files()


@pytest.mark.parametrize(
    "words",
    [
        "bench launch",
        "bench step",
        "compare image",
        "demo",
        "prove",
        "scale",
        "train image",
        "train lm --config demo",
        "train nmt --config demo",
    ],
)
@pytest.mark.parametrize("place", ["", "absent/rows.json"])
def test_rows_that_could_not_be_written_are_refused_before_the_work(
    words: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = [__file__] if words in ("prove", "scale") else []
    assert main([*words.split(), "--json", str(tmp_path / place), *script]) == 2
    assert "--json" in capsys.readouterr().err


def test_two_words_for_one_file_are_refused(asked: list[LaunchOptions], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file.json"
    assert run_command(command, ["--report-json", str(path), "--trace", str(path), "train.py"], name="hora run") == 2
    assert f"--trace would write over {path}, which --report-json names already" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--json would write over .*, which --png names already"):
        check_files(path, path)
