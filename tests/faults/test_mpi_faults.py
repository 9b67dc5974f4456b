"""What goes wrong with MPI: ranks that die, fail, come late or were started by somebody else, and an installation without it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher_kit import Job

from hora.comm.backends import choose_backend
from hora.errors import ConfigError
from hora.launch.pmi import ProcessManager, require_mpi

MPIEXEC = Path(sys.executable).parent / "mpiexec"
TIMEOUT_S = 60
SOON_S = 5.0

needs_mpi = pytest.mark.skipif(not MPIEXEC.exists(), reason="there is no mpiexec beside this Python: pip install 'hora[mpi]'")

BODY = """
import datetime
import torch, torch.distributed as dist

dist.init_process_group("mpi", timeout=datetime.timedelta(seconds=60))
tensor = torch.ones(1000)
dist.all_reduce(tensor)
tell("pid", os.getpid())
"""
FOREVER = """
while True:
    dist.all_reduce(tensor)
"""


def test_rank_that_is_killed_is_named_and_all_are_gone(tmp_path):
    pytest.importorskip("mpi4py")
    job = Job(tmp_path, BODY + FOREVER, "--mpi", "-np", "3")
    pids = {rank: numbers[0] for rank, numbers in job.expect("pid", 3).items()}
    os.kill(pids[1], 9)
    assert job.gone_after(pids.values()) < SOON_S
    assert job.wait() == 137
    assert f"rank 1 failed on {os.uname().nodename} (process {pids[1]}): killed by SIGKILL" in job.err


def test_launcher_that_is_killed_leaves_no_rank(tmp_path):
    pytest.importorskip("mpi4py")
    job = Job(tmp_path, BODY + FOREVER, "--mpi", "-np", "2")
    pids = [numbers[0] for numbers in job.expect("pid", 2).values()]
    os.kill(job.pid, 9)
    assert job.gone_after(pids) < SOON_S


def test_code_of_the_rank_that_fails_is_the_jobs(tmp_path):
    pytest.importorskip("mpi4py")
    job = Job(tmp_path, BODY + "if RANK == 1:\n    sys.exit(3)\n" + FOREVER, "--mpi", "-np", "2")
    job.expect("pid", 2)
    assert job.wait() == 3
    assert "rank 1 failed" in job.err


def mpiexec(tmp_path: Path, size: int, script: str, *words: str, **environ: str) -> tuple[subprocess.CompletedProcess[str], float]:
    path, begun_s = tmp_path / "script.py", time.monotonic()
    path.write_text(script)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HORA_")} | {"OMP_NUM_THREADS": "1"} | environ
    command = [MPIEXEC, "-n", str(size), sys.executable, *words, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=variables)
    return result, time.monotonic() - begun_s


PLAIN = """
import datetime, os, signal, sys, time
import torch, torch.distributed as dist, hora.mpi

dist.init_process_group("mpi", timeout=datetime.timedelta(seconds={timeout_s}))
tensor = torch.ones(1000)
dist.all_reduce(tensor)
if dist.get_rank() == 1:
    {deed}
while True:
    dist.all_reduce(tensor)
"""


@needs_mpi
@pytest.mark.parametrize(
    ("deed", "words", "code", "said"),
    [
        ("os.kill(os.getpid(), 9)", (), 9, "EXIT CODE: 9"),
        ("raise ValueError('no such number')", (), None, "ValueError: no such number"),
        ("sys.exit(3)", ("-m", "hora.mpi"), 3, ""),
        (
            "raise ValueError('mpi4py would wait')",
            ("-c", "from mpi4py import MPI; exec(open(__import__('sys').argv[1]).read())"),
            None,
            "mpi4py would wait",
        ),
    ],
)
def test_rank_that_fails_under_mpiexec_ends_the_job(tmp_path, deed, words, code, said):
    result, took_s = mpiexec(tmp_path, 2, PLAIN.format(deed=deed, timeout_s=300), *words)
    assert result.returncode != 0
    assert code in (None, result.returncode)
    assert said in result.stdout + result.stderr
    assert took_s < 30  # far from the deadline of the others


@needs_mpi
def test_rank_that_is_late_is_not_waited_for_beyond_the_deadline(tmp_path):
    result, _ = mpiexec(tmp_path, 2, PLAIN.format(deed="time.sleep(600)", timeout_s=2))
    assert result.returncode != 0
    assert "timed out: rank 0 waited 2.0 s in all_reduce of 3.9 KiB float32 SUM (2 ranks)" in result.stderr


BREAKS_OFF = """
def ring(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, ring)
if dist.get_rank() == 0:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        dist.all_reduce(tensor)
    except KeyboardInterrupt:
        dist.all_reduce(tensor)
time.sleep(600)
"""


@needs_mpi
def test_call_that_a_signal_breaks_off_is_the_last_one(tmp_path):
    before, _, _ = PLAIN.partition("if dist.get_rank")
    result, took_s = mpiexec(tmp_path, 2, before.format(timeout_s=300) + BREAKS_OFF)
    assert result.returncode != 0
    assert "of no use any more since a call has failed: KeyboardInterrupt has broken off a call" in result.stderr
    assert took_s < 30


def test_survivor_sees_for_itself_that_a_rank_is_gone(tmp_path):
    """Long before its deadline, and where no launcher ends it: MPI itself would wait for ever."""
    pytest.importorskip("mpi4py")
    script = tmp_path / "script.py"
    script.write_text(PLAIN.format(deed="os.kill(os.getpid(), 9)", timeout_s=300))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HORA_")} | {"OMP_NUM_THREADS": "1"}
    with ProcessManager(2) as manager:
        survivor, dead = (
            subprocess.Popen(
                [sys.executable, str(script)], env=environ | manager.environ(rank), pass_fds=[manager.descriptor(rank)],
                stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        )  # fmt: skip
        _, said = survivor.communicate(timeout=TIMEOUT_S)
        dead.communicate(timeout=TIMEOUT_S)
    assert survivor.returncode == 1
    assert f"connection lost: rank 1 (process {dead.pid} on {os.uname().nodename}) is gone; rank 0 was in all_reduce" in said


STRANGER = """
import sys, hora
from hora.errors import ConfigError
try:
    hora.init(backend="mpi", device="cpu", timeout_s=20)
except ConfigError as error:
    sys.exit(f"refused: {error}")
"""


@needs_mpi
def test_world_that_mpi_does_not_know_is_refused(tmp_path):
    """As under another MPI's launcher: the environment speaks of three ranks, MPI of one."""
    (tmp_path / "script.py").write_text(STRANGER)
    variables = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HORA_")} | variables
    result = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "rank 0 of 3 by its environment, but rank 0 of 1 by MPI (MPICH 5" in result.stderr, result.stderr


def test_installation_without_mpi4py_is_told_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'mpi \(mpi4py is not installed: pip install "hora\[mpi\]"\)'):
        choose_backend("mpi", "cpu", 2)
    with pytest.raises(ConfigError, match=r'--mpi needs mpi4py and an MPI.* pip install "hora\[mpi\]"'):
        require_mpi()


def test_ranks_that_no_mpi_started_are_told_how_to_start(monkeypatch):
    pytest.importorskip("mpi4py")
    for name in ("PMI_RANK", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="not started by an MPI: start with `hora run --mpi` or `mpiexec`"):
        choose_backend("mpi", "cpu", 2)
