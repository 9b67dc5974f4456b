"""The script for sbatch, run by a bash whose `srun` says what it was asked for; and what sbatch answers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hora.errors import ConfigError, LaunchError
from hora.launch import horovod_words, slurm
from hora.launch.command import command
from hora.launch.console import run_command
from hora.launch.deadlines import Deadlines
from hora.launch.hosts import Host
from hora.launch.options import LaunchOptions


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "my train.py").write_text("")
    return str(tmp_path / "my train.py")


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


SAYS = f"#!{sys.executable}\nimport json, os, sys\njson.dump([sys.argv[1:], os.getcwd(), os.environ.get('NAMED')], open(os.environ['SAID'], 'w'))\n"


def test_the_script_runs_the_ranks_as_they_were_asked_for(tmp_path: Path, script: str) -> None:
    words = ("two words", "'\"$(touch x)\n", "ä")
    place = tmp_path / "a 'place'"
    place.mkdir()
    options = LaunchOptions(
        script,
        words,
        nproc=8,
        num_nodes=2,
        exports={"NAMED": "a\n'b' $x"},
        slurm_options=("--partition=gpu", "--gpus-per-task=1"),
        bind="core",
    )
    text = slurm.batch_script(options, str(place), os.environ)
    head = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert head[:3] == ["#SBATCH --job-name=my_train.py", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=4"]
    assert head[-2:] == ["#SBATCH --partition=gpu", "#SBATCH --gpus-per-task=1"]
    program(tmp_path / "srun", SAYS)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SAID": str(tmp_path / "said")}
    subprocess.run(["bash"], input=text, text=True, env=environ, check=True, timeout=60)
    arguments, directory, named = json.loads((tmp_path / "said").read_text())
    assert arguments[-6:] == [sys.executable, "-u", script, *words]
    assert "--kill-on-bad-exit=1" in arguments
    assert "--cpu-bind=cores" in arguments
    assert (directory, named) == (str(place), "a\n'b' $x")


def test_what_slurm_decides_is_refused_all_at_once(script: str) -> None:
    options = LaunchOptions(
        script,
        hosts=(Host("a"), Host("b")),
        nproc_per_node="auto",
        master_port=1,
        log_dir=Path("x"),
        output_dir=Path("x"),
        max_restarts=1,
        deadlines=Deadlines.read("off"),
        key_file=Path("x"),
        master_addr="node0",
        grace_s=1.0,
        join_timeout_s=2.0,
        quiet=True,
        exports={"API_TOKEN": "canary"},
    )
    with pytest.raises(ConfigError) as caught:
        slurm.batch_script(options, "/", {})
    words = "-H auto --master-port --log-dir --output-dir --max-restarts --deadline --key-file --master-addr --grace --join-timeout --quiet API_TOKEN"
    for name in words.split():
        assert name in str(caught.value)
    assert "canary" not in str(caught.value)
    with pytest.raises(ConfigError, match="--max-ranks and --host-discovery: Slurm chooses the hosts"):
        slurm.batch_script(LaunchOptions(script, host_discovery=("ask",), nproc=1), "/", {})


def test_a_script_for_horovod_finds_hora_in_its_place(script: str) -> None:
    asked = LaunchOptions(script, exports={"HORA_HOROVOD": "1"})
    lines = slurm.batch_script(asked, "/", {"PYTHONPATH": "/my code"}).splitlines()
    path = next(line for line in lines if line.startswith("export PYTHONPATH="))
    assert path == f"export PYTHONPATH='{horovod_words.STANDIN}:/my code'"
    assert "PYTHONPATH" not in slurm.batch_script(LaunchOptions(script), "/", {"PYTHONPATH": "/my code"})


def test_the_target_is_meant_from_the_directory_of_the_ranks(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    words = ["--slurm", "--wdir", tmp_path.name, "--shared-dir", "shared", Path(script).name]
    assert run_command(command, words, name="hora run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"cd -- {tmp_path}" in lines
    assert f"export HORA_SHARED_DIR={tmp_path.parent}/shared" in lines
    assert Path.cwd() == tmp_path.parent
    assert run_command(command, ["--slurm", "--wdir", "none", "train.py"], name="hora run") == 2
    assert "--wdir none must be a directory, but: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["partition=gpu", "--x\nrm -rf", "--x\rrm"])
def test_options_that_are_none_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="must be followed by an option of sbatch"):
        slurm.read_options(["--time=1", word])


def test_a_job_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    program(tmp_path / "sbatch", f"#!/bin/sh\ncat > {tmp_path}/taken\necho '4711;cluster'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert run_command(command, ["--slurm", "--submit", "-np", "2", script], name="hora run") == 0
    assert capsys.readouterr().out == "submitted as job 4711\n"
    assert run_command(command, ["--slurm", "-np", "2", script], name="hora run") == 0
    assert capsys.readouterr().out == (tmp_path / "taken").read_text()


def test_words_are_bytes_in_the_script_as_they_were_given(tmp_path: Path) -> None:
    """Also those that are no UTF-8, and where the locale knows ASCII alone."""
    taken, word = tmp_path / "taken", b"caf\xc3\xa9 \xff"
    program(tmp_path / "sbatch", f"#!/bin/sh\ncat > {taken}\necho 4711\n")
    (tmp_path / "train.py").touch()
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "hora.launch", "--slurm"]
    shown = subprocess.run([*command, "train.py", word], env=environ, cwd=tmp_path, capture_output=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert b" '" + word + b"'\n" in shown.stdout
    submitted = subprocess.run([*command, "--submit", "train.py", word], env=environ, cwd=tmp_path, capture_output=True, check=False)
    assert submitted.returncode == 0, submitted.stderr
    assert taken.read_bytes() == shown.stdout


def test_what_sbatch_says_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no sbatch in PATH"):
        slurm.submit("")
    program(tmp_path / "sbatch", "#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    with pytest.raises(LaunchError, match="did not take the job: invalid partition"):
        slurm.submit("")


def test_submitting_needs_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(command, ["--submit", "train.py"], name="hora run") == 2
    assert re.search("go with --slurm", capsys.readouterr().err)
