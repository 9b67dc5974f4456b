"""The command line of the launcher: options in, exit code out; mistakes are one sentence, before anything is started."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hora.launch.job
from hora.errors import ConfigError, LaunchError
from hora.launch.command import command
from hora.launch.console import run_command
from hora.launch.hosts import Host
from hora.launch.options import LaunchOptions


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[LaunchOptions]:
    """The options with which jobs were asked for; each "ends" with 7."""
    options: list[LaunchOptions] = []

    def launch(given: LaunchOptions) -> int:
        options.append(given)
        return 7

    monkeypatch.setattr(hora.launch.job, "launch", launch)
    return options


def run(*words: str) -> int:
    return run_command(command, words, name="hora run")


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["train.py"], {}),
        (["-np", "4", "train.py"], {"nproc": 4}),
        (["-m", "train"], {"target": "train", "kind": "module"}),
        (["--module", "train"], {"target": "train", "kind": "module"}),
        (["--no-python", "train"], {"target": "train", "kind": "program"}),
        (["--no_python", "train"], {"target": "train", "kind": "program"}),
        (["--nproc_per_node=4", "train.py"], {"nproc_per_node": "4"}),
        (["--nproc-per-node", "gpu", "train.py"], {"nproc_per_node": "gpu"}),
        (
            ["--nnodes=2", "--node_rank=1", "--master_addr=10.0.0.1", "--master_port=1234", "src.bin.train"],
            {"target": "src.bin.train", "num_nodes": 2, "node_rank": 1, "master_addr": "10.0.0.1", "master_port": 1234},
        ),
        (
            ["--key_file", "k", "--log-dir", "d", "--grace", "5", "t.py"],
            {"target": "t.py", "key_file": Path("k"), "log_dir": Path("d"), "grace_s": 5.0},
        ),
        (
            ["--min-ranks", "2", "--max-ranks", "4", "--host-discovery", "./ask 'two words'", "--discovery-interval", "60", "train.py"],
            {"min_ranks": 2, "max_ranks": 4, "host_discovery": (os.path.abspath("ask"), "two words"), "discovery_interval_s": 60.0},
        ),
        (["-H", "a:2,b", "-H", "c:3", "train.py"], {"hosts": (Host("a", 2), Host("b"), Host("c", 3))}),
        (["--join-timeout", "9", "-q", "-v", "train.py"], {"join_timeout_s": 9.0, "quiet": True, "verbose": True}),
    ],
)
def test_options_are_understood(asked: list[LaunchOptions], words: list[str], options: dict[str, Any]) -> None:
    assert run(*words) == 7
    assert asked == [LaunchOptions(**{"target": "train.py"} | options)]


@pytest.mark.parametrize(
    "args",
    [
        ["-np", "9", "--nnodes", "x", "-m", "--help", "--version"],
        ["--", "--a_b", "-x"],
        ["--name=a b", "it's", '"', "", "$HOME", "*", "\n", "ä"],
    ],
)
def test_everything_after_the_script_belongs_to_it(asked: list[LaunchOptions], args: list[str]) -> None:
    assert run("train.py", *args) == 7
    assert asked == [LaunchOptions("train.py", tuple(args))]


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "hora run -np 4 train.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Missing argument 'TARGET'"),
        (["-np", "0", "train.py"], "-np must be at least 1, but is 0 instead"),
        (["-np", "two", "train.py"], "-np must be a number or `auto`, but is 'two'"),
        (["--nproc", "2", "train.py"], "--num-proc"),
        (["-m", "--no-python", "x"], "contradict each other"),
        (["missing.py"], "there is no script 'missing.py'"),
        (["-np", "10000000", "{script}"], "10000000 ranks on one node need"),
        (["--master-addr", "no.such.host.invalid", "{script}"], "can resolve"),
        (["--master-addr", "-oProxyCommand=x", "{script}"], "must be a host name or an address"),
        (["--nnodes", "2", "--node-rank", "2", "{script}"], "--node-rank must be from 0 to nnodes - 1 = 1, but is 2 instead"),
        (["--log-dir", "{script}/logs", "{script}"], "the log directory {script}/logs cannot be made"),
        (
            ["--output-dir", "{script}/out", "{script}"],
            "the log directory {script}/out/rank.0 cannot be made: Not a directory; name another with --output-dir",
        ),
        (["--grace", "-1", "{script}"], "--grace must be 0 seconds or more"),
        (["--grace", "1e20", "{script}"], "--grace must be 0 seconds or more, 1e+09 at most"),
        (["--join-timeout", "1e20", "{script}"], "--join-timeout must be more than 0 seconds, 1e+09 at most"),
        (["--deadline", "step=1e20", "{script}"], "step must be a number of seconds above 0 (1e+09 at most)"),
        (["--nproc-per-node", "many", "{script}"], "but is 'many' instead"),
        (["-H", "a", "--host-discovery", "ask", "{script}"], "contradicts -H and --hostfile"),
        (["--host-discovery", "ask", "--nnodes", "2", "--min-ranks", "1", "{script}"], "contradicts --nnodes and --node-rank"),
        (["--host-discovery", "ask 'x", "--min-ranks", "1", "{script}"], "--host-discovery must be a command, but"),
        (["--host-discovery", "", "--min-ranks", "1", "{script}"], "but is empty"),
        (["--host-discovery", "/no/such/program", "--min-ranks", "1", "{script}"], "/no/such/program cannot be started: No such file"),
        (
            ["--host-discovery", "echo -oProxyCommand=x", "--min-ranks", "1", "{script}"],
            "a host must be a name or an address, but is '-oProxy",
        ),
        (["--host-discovery", "echo a b", "--min-ranks", "1", "{script}"], "--host-discovery echo a b:1: a host must read host:slots"),
        (["--max-ranks", "2", "{script}"], "needs -H or --host-discovery"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'started')!r}, 'w')\n")
    monkeypatch.setenv("HORA_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert run(*(word.format(script=script) for word in words)) == 2
    said = capsys.readouterr().err
    assert message.format(script=script) in said
    assert "Traceback" not in said
    assert not (tmp_path / "started").exists()
    assert not list(tmp_path.glob("hora-job-*"))


@pytest.mark.parametrize(("error", "code"), [(ConfigError("wrong"), 2), (LaunchError("broken"), 1)])
def test_errors_become_one_sentence_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    def launch(_options: LaunchOptions) -> int:
        raise error

    monkeypatch.setattr(hora.launch.job, "launch", launch)
    assert run("train.py") == code
    assert capsys.readouterr().err == f"hora: {error}\n"


@pytest.mark.parametrize("program", [["-m", "hora.launch"], ["-m", "hora", "run"]])
def test_the_commands_work_as_programs(tmp_path: Path, program: list[str]) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.argv, sys.path[0]); sys.exit(3)\n")
    environ = os.environ | {"HORA_STATE_DIR": str(tmp_path / "state")}
    command = [sys.executable, *program, str(tmp_path / "script.py"), "a b"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert done.stdout == f"{[str(tmp_path / 'script.py'), 'a b']} {tmp_path}\n"


def test_a_shared_directory_reaches_the_ranks_as_a_full_path(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORA_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    assert run("--shared-dir", "objects", "--no-python", "sh", "-c", 'echo "$HORA_SHARED_DIR"') == 0
    assert capfd.readouterr().out == f"{tmp_path / 'objects'}\n"


def test_a_program_that_is_no_python_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORA_STATE_DIR", str(tmp_path / "state"))
    assert run("-np", "2", "--no-python", "sh", "-c", 'echo "$RANK of $WORLD_SIZE"') == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"]


def test_pythonpath_reaches_the_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "mine.py").write_text("import os\nprint('mine', os.environ['RANK'])\n")
    monkeypatch.setenv("HORA_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'lib'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert run("mine") == 0
    assert capfd.readouterr().out == "mine 0\n"
