"""Jobs that go on after a rank or a host is lost: a new generation of ranks, from the newest checkpoint, with the same bits."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hosts_kit import Hosts, StartOn
from launcher_kit import Job, Start, kill
from safetensors.torch import load_file

from hora.recipes.lm.text import EXCERPT

GENERATIONS = "generation = int(os.environ['HORA_GENERATION'])\ntell('born', generation, os.getpid(), int(os.environ['WORLD_SIZE']))\n"


def born(job: Job, ranks: int, generation: int) -> list[int]:
    """The processes of a generation, once they are all there."""
    told = job.expect("born", ranks)
    assert {(numbers[0], numbers[2]) for numbers in told.values()} == {(generation, ranks)}
    return [numbers[1] for numbers in told.values()]


def test_a_killed_rank_is_followed_by_a_new_generation_of_all(start: Start, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    body = f"print('hello', os.environ['HORA_GENERATION'], flush=True)\n{GENERATIONS}if generation < 2:\n    wait_forever()\n"
    job = start(body, "--max-restarts", "3", "--log-dir", str(logs))
    for generation in (0, 1):
        pids = born(job, 2, generation)
        another = start("print('another')\n", "--log-dir", str(logs))  # leaves the logs alone, those of earlier generations too
        assert another.wait() == 2
        assert f"the log {logs}/rank0.log must be written by one job at a time" in another.err
        os.kill(pids[1], signal.SIGKILL)
    born(job, 2, 2)
    assert job.wait() == 0
    assert "restart 1 of at most 3" in job.err
    assert "restart 2 of at most 3" in job.err
    assert [(logs / place / "rank1.log").read_text() for place in (".", "restart-1", "restart-2")] == [
        "hello 0\n",
        "hello 1\n",
        "hello 2\n",
    ]
    assert not job.members()


def test_a_job_that_fails_each_time_ends_with_the_last_failure(start: Start) -> None:
    job = start(GENERATIONS + "sys.exit(10 + generation if RANK else 0)\n", "--max-restarts", "2")
    assert job.wait() == 12
    assert job.err.count("all ranks are started anew") == 2


def test_ctrl_c_ends_the_job_and_not_a_generation(start: Start) -> None:
    job = start(GENERATIONS + "wait_forever()\n", "--max-restarts", "2")
    os.kill(born(job, 2, 0)[0], signal.SIGKILL)
    born(job, 2, 1)
    os.kill(job.pid, signal.SIGINT)
    assert job.wait() == 130
    assert not job.members()


def test_sigterm_while_a_failed_generation_is_ended_is_the_end(start: Start, tmp_path: Path) -> None:
    """A signal that comes when there is nothing left to stop is not forgotten."""
    go = tmp_path / "go"
    body = (
        f"{GENERATIONS}if RANK == 1:\n    while not os.path.exists({str(go)!r}):\n        time.sleep(0.01)\n    sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, lambda *_: tell('asked'))\ntell('ready')\nwait_forever()\n"
    )
    job = start(body, "--max-restarts", "2")
    heard = job.expect_any(3)
    assert set(heard) == {"born", "ready"}
    go.touch()
    job.expect("asked", 1)
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait() == 3
    assert "started anew" not in job.err


def test_nothing_of_a_later_generation_outlives_a_killed_launcher(start: Start) -> None:
    job = start(GENERATIONS + "wait_forever()\n", "--max-restarts", "2")
    first = born(job, 2, 0)
    # That of the generation, and that which outlives it.
    before = job.left_in_temporary()
    assert len(before) == 2
    os.kill(first[0], signal.SIGKILL)
    pids = born(job, 2, 1)
    assert len(set(before) & set(job.left_in_temporary())) == 1
    guardian = job.guardian().pid
    kill(job.pid)
    job.gone_after([*pids, guardian])
    assert job.left_in_temporary() == []


@pytest.mark.parametrize(("fewest", "goes_on"), [("2", True), ("3", False)])
def test_a_host_that_is_lost_is_left_out(start_on: StartOn, hosts: Hosts, fewest: str, goes_on: bool) -> None:
    job = start_on(
        "alpha:2,beta:2", GENERATIONS + "if generation == 0:\n    wait_forever()\n", "--max-restarts", "1", "--min-ranks", fewest
    )
    born(job, 4, 0)
    os.kill(hosts.processes("beta")[0], signal.SIGKILL)
    if goes_on:
        born(job, 2, 1)
    assert job.wait() == (0 if goes_on else 1)
    assert "the host beta is lost" in job.err
    assert ("with 2 ranks on 1 host" in job.err) is goes_on


def test_a_host_that_does_not_answer_at_the_restart_is_left_out(start_on: StartOn, hosts: Hosts, tmp_path: Path) -> None:
    """A rank of alpha dies, and beta is gone when the job is to be started anew."""
    gone = tmp_path / "gone"
    body = GENERATIONS + "if generation == 0:\n    wait_forever()\n"
    job = start_on("alpha:2,beta:2", body, "--max-restarts", "1", "--min-ranks", "2", UNREACHABLE=str(gone))
    pids = born(job, 4, 0)
    gone.write_text("beta")
    os.kill(pids[0], signal.SIGKILL)
    born(job, 2, 1)
    assert job.wait() == 0
    assert "beta cannot be used (exit code 255): ssh: connect to host beta port 22: No route to host" in job.err
    assert "left out: the job goes on with 2 ranks on 1 host" in job.err


WRONG_ENDS = """\
import hora
from hora.errors import CheckpointMismatch, CollectiveError, ConfigError

{before}
raise {error}("as ever")
"""


# torch.distributed has a hook of its own for errors once a group has begun.
AMONG_RANKS = "hora.init(backend='gloo')"


@pytest.mark.parametrize(
    ("before", "error", "code", "starts"),
    [("", "ConfigError", 2, 1), (AMONG_RANKS, "ConfigError", 2, 1), ("", "CheckpointMismatch", 2, 1), ("", "CollectiveError", 1, 2)],
)
def test_an_error_that_would_come_again_uses_up_no_restart(start: Start, before: str, error: str, code: int, starts: int) -> None:
    job = start("tell('born')\n" + WRONG_ENDS.format(before=before, error=error), "--max-restarts", "1", ranks=1)
    for _ in range(starts):
        job.expect("born", 1)
    assert job.wait() == code
    assert job.err.count("Traceback (most recent call last)") >= starts
    assert ("all ranks are started anew" in job.err) is (starts == 2)
    assert ("not started anew: exit code 2" in job.err) is (starts == 1)


def test_an_exact_run_that_is_killed_has_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for split, count in (("train", 1600), ("valid", 100), ("test", 100)):
        words = (EXCERPT / f"{split}.txt").read_text(encoding="utf-8").split()[:count]
        (texts / f"{split}.txt").write_text(" ".join(words) + "\n", encoding="utf-8")
    settings = ["data.rows=8", "data.max_vocabulary=80", "model.hidden_size=8", "model.keep_prob=0.8", "epochs=1", "logical_ranks=4"]
    settings += ["checkpoint.every_steps=2", "tensorboard=false"]

    def run(name: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "hora", "train", "lm", "--config", "demo", "--data", str(texts), "--exact", "--nproc", "2"]
        words += [word for setting in settings for word in ("--set", setting)]
        environ = {**os.environ, "HORA_STATE_DIR": str(tmp_path / "state"), **variables}
        return subprocess.run([*words, "--run-dir", str(tmp_path / name), *flags], env=environ, capture_output=True, text=True, timeout=180)

    assert run("whole").returncode == 0
    disturbed = run("parts", "--max-restarts", "1", HORA_FAULT="rank=1,point=step.5.before,act=SIGKILL,generation=0")
    assert disturbed.returncode == 0, disturbed.stderr
    assert "restart 1 of at most 1" in disturbed.stderr
    assert "resumed at step 4" in disturbed.stderr
    whole, parts = (max((tmp_path / name / "checkpoints").iterdir()) for name in ("whole", "parts"))
    assert parts.name == whole.name.replace(".g0", ".g1")
    for file in ("model", "progress"):
        ours, theirs = load_file(parts / f"{file}.safetensors"), load_file(whole / f"{file}.safetensors")
        assert all(bool((ours[name] == theirs[name]).all()) for name in theirs)
