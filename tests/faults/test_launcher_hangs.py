"""Ranks that make no progress: named with where they stand, ended, and started anew where that was asked for."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hosts_kit import StartOn
from launcher_kit import Job, Start, kill

from hora.launch.job_events import HANG_EXIT_CODE

NOTICED_S = 4.0
"""How soon a stopped rank is noticed, in the words of the documentation."""

WAITING = "tell('ready', os.getpid())\nwait_forever()\n"
# What a rank says as it trains, without torch.
JOINED = "from hora import pulse\nimport threading\npage = pulse.mine()\npage.open(300.0)\n"
# All have ended a step when the second begins, from which on `--deadline step` counts: how long they took to start does not matter.
STEPPED = f"""{JOINED}page.begin_step()
page.end_step()
tell("stepped")
while not os.path.exists(os.path.dirname(os.path.abspath(__file__)) + "/go"):
    time.sleep(0.01)
page.begin_step()
"""
WAITS = f"{STEPPED}if RANK != 1:\n    page.begin_call('all_reduce', 7, 7)\n    wait_forever()\n"
STANDING = {
    "computing": "while True:\n        pass",
    "sleeping": "time.sleep(600)",
    "locked": "lock = threading.Lock()\n    lock.acquire()\n    lock.acquire()",
}


def let_go(job: Job, ranks: int) -> None:
    job.expect("stepped", ranks)
    (job.directory / "go").touch()


def report_file(job: Job) -> str:
    return Path(job.err.partition("stacks of all ranks: ")[2].partition(";")[0].strip()).read_text()


def test_a_stopped_rank_is_noticed_and_named(start: Start) -> None:
    job = start(WAITING, ranks=3)
    pids = {rank: pid for rank, (pid,) in job.expect("ready", 3).items()}
    kill(pids[1], signal.SIGSTOP)
    assert job.gone_after(pids.values()) < NOTICED_S
    assert job.wait() == HANG_EXIT_CODE
    assert "hora: rank 1 is stopped, for 2." in job.err
    assert f"(process {pids[1]})" in job.err


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A control group whose processes can be frozen; they are not in the end."""
    group = Path(f"/sys/fs/cgroup/freezer/hora-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs the right to make control groups (version 1)")
    try:
        yield group
    finally:
        (group / "freezer.state").write_text("THAWED")
        with suppress(OSError):  # its processes take a moment to go
            group.rmdir()


def test_a_rank_that_is_frozen_with_its_group_is_noticed_and_named(start: Start, freezer: Path) -> None:
    job = start(WAITING)
    pids = [pid for _, (pid,) in sorted(job.expect("ready", 2).items())]
    (freezer / "cgroup.procs").write_text(str(pids[1]))
    (freezer / "freezer.state").write_text("FROZEN")
    frozen_s = time.monotonic()
    while Path(f"/proc/{pids[0]}").exists():  # the others are ended at once; a frozen process cannot be
        assert time.monotonic() - frozen_s < NOTICED_S
        time.sleep(0.02)
    (freezer / "freezer.state").write_text("THAWED")
    assert job.wait() == HANG_EXIT_CODE
    assert re.search(r"hora: rank 1 is stopped, for \d\.\d s now: .* or with its control group", job.err)
    assert job.gone_after(pids) < NOTICED_S


def test_a_rank_that_goes_on_in_time_is_not_ended(start: Start) -> None:
    job = start("signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n" + WAITING)
    pids = [pid for (pid,) in job.expect("ready", 2).values()]
    kill(pids[1], signal.SIGSTOP)
    kill(pids[1], signal.SIGCONT)
    for pid in pids:
        kill(pid, signal.SIGUSR1)
    assert job.wait() == 0


def test_the_time_in_which_the_launcher_is_stopped_too_does_not_count(start: Start) -> None:
    """As when a scheduler suspends a job: all processes are stopped, and go on later, the launcher first."""
    job = start("signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n" + WAITING)
    pids = [pid for (pid,) in job.expect("ready", 2).values()]
    for pid in (job.pid, *pids):
        kill(pid, signal.SIGSTOP)
    time.sleep(2.5)  # longer than a rank may be stopped
    for pid in (job.pid, *pids):
        kill(pid, signal.SIGCONT)
    for pid in pids:
        kill(pid, signal.SIGUSR1)
    assert job.wait() == 0, job.err


@pytest.mark.parametrize("how", STANDING)
def test_a_rank_that_the_others_wait_for_is_named_with_its_stack(start: Start, how: str) -> None:
    job = start(f"{WAITS}def hang():\n    {STANDING[how]}\n\n\nhang()\n", "--deadline", "step=1", ranks=3)
    let_go(job, 3)
    assert job.wait() == HANG_EXIT_CODE, job.err
    assert "the job hangs: rank 1 is missing" in job.err
    assert "in hang" in job.err
    assert "ranks 0, 2: waiting in all_reduce #7, at job0.py" in job.err
    assert report_file(job).count("Current thread 0x") == 3
    assert len(job.err.splitlines()) < 20
    assert not job.members()


def test_a_job_that_hangs_is_started_anew(start: Start) -> None:
    job = start(
        f"if os.environ['HORA_GENERATION'] == '1':\n    sys.exit(0)\n{WAITS}wait_forever()\n",
        "--deadline",
        "step=1",
        "--max-restarts",
        "1",
    )
    let_go(job, 2)
    assert job.wait() == 0, job.err
    assert "the job hangs: rank 1 is missing" in job.err
    assert "restart 1 of at most 1" in job.err


def test_the_rank_to_blame_is_found_on_another_host(start_on: StartOn) -> None:
    job = start_on("alpha:2,beta:1", f"{WAITS.replace('!= 1', '!= 2')}while True:\n    pass\n", "--deadline", "step=1")
    let_go(job, 3)
    assert job.wait() == HANG_EXIT_CODE, job.err
    assert "the job hangs: rank 2 is missing" in job.err
    assert "rank 2 on beta" in job.err
    assert "ranks 0, 1: waiting in all_reduce #7" in job.err
    assert report_file(job).count("Current thread 0x") == 3


def test_a_script_that_says_nothing_is_left_alone(start: Start) -> None:
    job = start("time.sleep(2)\n", "--deadline", "step=0.5,checkpoint=0.5,evaluation=0.5")
    assert job.wait() == 0, job.err


def test_a_rank_that_does_not_come_to_its_start_is_ended_at_its_deadline(start: Start) -> None:
    job = start("wait_forever()\n", "--deadline", "start=1", ranks=1)
    assert job.wait() == HANG_EXIT_CODE, job.err
    assert "rank 0" in job.err
    assert "(deadline 1 s)" in job.err


def test_a_hang_in_training_is_told_with_step_collective_and_line(start: Start) -> None:
    body = (
        "import torch, hora\nhora.init(backend='gloo')\nmodel = torch.nn.Linear(4, 2)\n"
        "optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)\n"
        "def spin():\n    while True:\n        pass\n\n\n"
        "for step in range(12):\n    for inputs in optimizer.micro_batches([torch.ones(8, 4)]):\n"
        "        if step == 11 and RANK == 1:\n            spin()\n"
        "        optimizer.backward(model(inputs).sum(), weight=8)\n    optimizer.step()\n"
    )
    job = start(body, "--deadline", "step=1")
    assert job.wait() == HANG_EXIT_CODE, job.err
    assert "rank 1 is missing" in job.err
    assert "in step 12 since the start" in job.err
    assert "in spin" in job.err
    assert "rank 0: waiting in update #" in job.err
    assert os.path.basename(job.script) in job.err


def test_a_horovod_script_says_its_steps_and_who_is_missing_for_which_tensor(start: Start) -> None:
    """Rank 1 does not come back after its third step, for which the others wait by name."""
    body = """
import hora.hvd as hvd
import torch

def look_up():
    while True:
        pass

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
if RANK == 1:
    look_up()
hvd.allreduce(torch.ones(1), name="loss")
"""
    job = start(body, "--deadline", "evaluation=3", ranks=3)
    assert job.wait() == HANG_EXIT_CODE, job.err
    assert "the job hangs: rank 1 is missing" in job.err
    assert "running after step 3 since the start" in job.err
    assert "in look_up" in job.err
    assert re.search(r"ranks 0, 2: waiting in \S*loss, at", job.err), job.err
    assert re.search(r"Missing ranks:\n  1: \[\S*loss\]\n  Waiting: ranks 0 and 2", job.err), job.err
