"""The registry of benches, the rows that they write, and the command that shows them."""

import json
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from hora.cli.bench import table
from hora.cli.main import main
from hora.diag.bench import launch, registry
from hora.diag.bench.registry import Measurement, Workload, available, register, rotated, workloads_of
from hora.diag.bench.rows import commit, rows, write_rows
from hora.errors import ConfigError, LaunchError

KEYS = {"what", "value", "unit", "ranks", "machine", "versions", "command", "commit", "samples"}


@pytest.fixture
def workload() -> Workload:
    """Two variants; each sample is the number of samples that were taken before, so that their order shows."""
    workload, taken = Workload("test.counting", "counting", unit="s", ranks=3), iter(range(1000))
    workload.variant("first")(lambda: float(next(taken)))
    workload.variant("second")(lambda: float(next(taken)))
    return workload


def test_variants_take_turns_after_a_round_that_does_not_count(workload: Workload) -> None:
    first, second = workload.measure(rounds=3)
    assert (first.variant, first.samples) == ("first", (2.0, 5.0, 6.0))
    assert (second.variant, second.samples) == ("second", (3.0, 4.0, 7.0))
    assert first.median == 5.0


def test_samples_are_told_as_they_are_taken(workload: Workload) -> None:
    told: list[tuple[str, float]] = []
    workload.measure(1, lambda variant, value: told.append((variant, value)))
    assert told == [("first", 2.0), ("second", 3.0)]


def test_names_are_rotated() -> None:
    assert [rotated("abc", by) for by in (-1, 0, 1, 2, 3)] == [list("cab"), list("abc"), list("bca"), list("cab"), list("abc")]


def test_benches_are_found_by_their_files() -> None:
    assert "launch" in available()
    assert {"registry", "rows"}.isdisjoint(available())
    assert {workload.name for workload in workloads_of("launch")} == {"launch.all_reduce", "launch.trivial"}


def test_an_unknown_bench_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown bench 'lunch'; choose one of: .*launch"):
        workloads_of("lunch")


def test_a_row_has_all_that_is_needed_to_measure_again(workload: Workload) -> None:
    (row,) = rows([Measurement(workload, "first", (3.0, 1.0, 2.0))], ["hora", "bench", "x y"])
    assert row.keys() == KEYS
    assert (row["what"], row["value"], row["unit"], row["ranks"]) == ("test.counting/first", 2.0, "s", 3)
    assert row["command"] == "hora bench 'x y'"
    assert row["samples"] == [3.0, 1.0, 2.0]
    assert row["versions"]["torch"] == metadata.version("torch")
    assert "cores" in row["machine"]


def test_the_commit_is_that_of_the_checkout() -> None:
    head = subprocess.run(
        ["git", "-C", str(Path(registry.__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    if head.returncode:
        assert commit() == "unknown"
    else:
        assert head.stdout.startswith(commit().removesuffix("-dirty"))


def test_rows_appear_whole(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.json", [{"what": "x"}])
    assert json.loads((tmp_path / "rows.json").read_text()) == [{"what": "x"}]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_the_table_shows_median_spread_and_ratio(workload: Workload) -> None:
    lines = table([Measurement(workload, "first", (2.0, 1.0, 4.0)), Measurement(workload, "second", (6.0, 5.0, 8.0))]).splitlines()
    assert lines[1].split() == ["first", "2", "1", "4", "1.00x"]
    assert lines[2].split() == ["second", "6", "5", "8", "3.00x"]


def test_the_command_measures_prints_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workload: Workload
) -> None:
    monkeypatch.setattr(registry, "_workloads", [])
    monkeypatch.setattr(registry, "available", lambda: ["test"])
    monkeypatch.setattr(registry, "importlib", SimpleNamespace(import_module=lambda _name: register(workload)))
    monkeypatch.setattr(sys, "argv", ["hora", "bench", "test", "--rounds", "2"])
    assert main(["bench", "test", "--rounds", "2", "--json", str(tmp_path / "rows.json")]) == 0
    shown = capsys.readouterr().out
    assert "test.counting: counting (3 ranks, 2 rounds)" in shown
    assert "first" in shown
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["what"], len(row["samples"])) for row in written] == [("test.counting/first", 2), ("test.counting/second", 2)]
    assert written[0]["command"] == "hora bench test --rounds 2"


def test_a_job_is_timed_under_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORA_STATE_DIR", str(tmp_path))
    assert 0.0 < launch.run_job(("hora.launch", "-np", "2"), "pass\n") < 60.0


def test_a_job_that_fails_is_no_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORA_STATE_DIR", str(tmp_path))
    with pytest.raises(LaunchError, match="hora.launch ended with exit code 3"):
        launch.run_job(("hora.launch", "-np", "2"), "raise SystemExit(3)\n")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_launcher_is_asked_to_end_its_ranks_when_the_bench_is(tmp_path: Path, signum: signal.Signals) -> None:
    """As torchrun must be, which leaves them alone when it is killed; and no temporary file stays."""
    temporary, told = tmp_path / "temporary", tmp_path / "told"
    temporary.mkdir()
    os.mkfifo(told)
    (tmp_path / "fake_launcher.py").write_text(
        "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(os.write(told, b'ended\\n') - 6))\n"
        f"told = os.open({str(told)!r}, os.O_WRONLY)\n"
        # The bench has come to wait for it.
        "while open(f'/proc/{os.getppid()}/stat').read().rpartition(') ')[2][0] != 'S':\n    pass\n"
        "os.write(told, b'begun\\n')\nwhile True:\n    signal.pause()\n"
    )
    bench = "from hora.diag.bench import launch\nfrom hora.launch.started import end_when_asked\n"
    bench += "end_when_asked()\nlaunch.run_job(('fake_launcher',), '')\n"
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen([sys.executable, "-c", bench], env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)}) as process:
        with told.open() as heard:
            assert heard.readline() == "begun\n"
            process.send_signal(signum)
            assert heard.readline() == "ended\n"
        assert process.wait(60) == 128 + signum
    assert list(temporary.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no file that is always full")
def test_rows_for_which_there_is_no_room_are_a_plain_error() -> None:
    with pytest.raises(ConfigError, match="cannot write /dev/full: No space left on device"):
        write_rows(Path("/dev/full"), [{"value": 1}])
