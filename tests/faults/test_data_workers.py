"""Worker processes of a loader that are killed, stopped, stuck or hit by the group's signals."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

import hora
from hora.data import workers
from hora.errors import ConfigError, DataError

STRUCK = 9


class Struck(Dataset):
    """40 samples; the worker that loads number 9 sends itself a signal."""

    def __init__(self, number: int):
        self.number = number

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index == STRUCK and get_worker_info() is not None:
            os.kill(os.getpid(), self.number)
        return index


def _load(number: int, **settings) -> None:
    """Every rank goes through the data set; rank 1 of 2 gets the sample that strikes."""
    # One request ahead a worker: what it has loaded before is out of it when it is struck.
    loader = hora.DataLoader(Struck(number), global_batch_size=8, shuffle=False, prefetch_factor=1, **settings)
    begin = time.monotonic()
    if hora.rank() == 0:
        assert sum(len(micro_batch) for step in loader for micro_batch in step) == 20
        return
    with pytest.raises(DataError) as caught:
        for step in loader:
            for _micro_batch in step:
                pass
    text = str(caught.value)
    # With two workers the error may come while the other one's micro-batch is waited for.
    where = "in step 1 of epoch 0 (samples 12, 13, 14, 15 of the data set) did not come" if settings["num_workers"] == 1 else "in step"
    assert text.startswith(f"the micro-batch of rank 1 of 2 {where}"), text
    assert psutil.Process().children() == []
    raise RuntimeError(f"after {time.monotonic() - begin:.1f} s: {text}")


def _load_killed(num_workers: int, persistent_workers: bool) -> None:
    global STRUCK
    STRUCK = 13
    _load(signal.SIGKILL, num_workers=num_workers, persistent_workers=persistent_workers)


def _load_stopped(num_workers: int) -> None:
    global STRUCK
    STRUCK = 13
    workers.TIMEOUT_S = 1.5
    _load(signal.SIGSTOP, num_workers=num_workers)


@pytest.mark.parametrize(("num_workers", "persistent_workers"), [(1, False), (2, False), (2, True)])
def test_a_killed_worker_ends_in_an_error_that_names_rank_and_samples(spawn_ranks, num_workers, persistent_workers):
    outcomes = spawn_ranks(2, _load_killed, num_workers=num_workers, persistent_workers=persistent_workers).wait()
    assert outcomes[0].kind == "passed", outcomes[0]
    found = re.search(r"after ([0-9.]+) s: .* did not come: worker process \d+ ended with SIGKILL", outcomes[1].text)
    assert found, outcomes[1]
    assert float(found[1]) < 5


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_stopped_worker_ends_in_an_error_by_default_and_is_not_left_behind(spawn_ranks, num_workers):
    outcomes = spawn_ranks(2, _load_stopped, num_workers=num_workers).wait()
    assert outcomes[0].kind == "passed", outcomes[0]
    found = re.search(r"after ([0-9.]+) s: .* did not come within timeout=1.5 s: a worker is stuck, or loading is slow", outcomes[1].text)
    assert found, outcomes[1]
    assert 1.5 <= float(found[1]) < 8


def run_script(tmp_path: Path, text: str, timeout_s: float = 60.0) -> tuple[subprocess.CompletedProcess[str], float]:
    """Runs `text` as a script in a process group of its own; also how long it took after it printed its last line."""
    script = tmp_path / "script.py"
    script.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=timeout_s, start_new_session=True, check=False
    )
    ended = time.time()
    lines = done.stdout.split()
    return done, ended - float(lines[-1]) if lines else float("nan")


STRUCK_SCRIPT = """\
import os, signal, sys, time
import hora, psutil
from hora.errors import DataError
from torch.utils.data import Dataset

class Numbers(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index == 8:
            os.kill(os.getpid(), signal.NAME)
        return index

def wait_until_worker(*states):
    (worker,) = psutil.Process().children()
    while worker.is_running() and worker.status() not in states:
        time.sleep(0.01)

if __name__ == "__main__":
    loader = hora.DataLoader(
        Numbers(), global_batch_size=8, shuffle=False, prefetch_factor=1, rank=0, world_size=1, **OPTIONS
    )
    steps = iter(loader)
    assert len(next(iter(next(steps)))) == 8
    print(time.time(), flush=True)
    THEN
"""


def struck_script(name: str, options: dict[str, Any], *then: str) -> str:
    """A script whose worker sends itself the signal `name` when it loads the second step, and that goes on with `then` after the first one."""
    return STRUCK_SCRIPT.replace("NAME", name).replace("OPTIONS", repr({"num_workers": 1} | options)).replace("THEN", "\n    ".join(then))


def test_a_killed_worker_that_was_not_forked_is_noticed_long_before_the_timeout(tmp_path):
    done, took_s = run_script(tmp_path, struck_script("SIGKILL", {"multiprocessing_context": "forkserver"}, "next(iter(next(steps)))"))
    assert "step 1 of epoch 0 (samples 8, 9, 10, 11, ... of the data set) did not come: worker process" in done.stderr, done.stderr
    assert "ended with SIGKILL" in done.stderr
    assert done.returncode == 1
    assert took_s < 10


def test_a_worker_that_dies_does_not_disturb_what_the_rank_does_meanwhile(tmp_path, monkeypatch):
    """Nor does it leave anything in the directory for temporary files."""
    temporary = tempfile.mkdtemp(prefix="w")  # of a name that is short enough for a socket in it
    monkeypatch.setenv("TMPDIR", temporary)
    then = (
        "wait_until_worker(psutil.STATUS_ZOMBIE)  # busy meanwhile, with the model or a checkpoint",
        "print('undisturbed', file=sys.stderr)",
        "next(iter(next(steps)))",
    )
    done, _took_s = run_script(tmp_path, struck_script("SIGKILL", {}, *then))
    assert done.stderr.startswith("undisturbed\n"), done.stderr
    assert "ended with SIGKILL" in done.stderr
    os.rmdir(temporary)


@pytest.mark.parametrize(("killed", "error"), [(True, DataError), (False, ConnectionResetError)])
def test_a_connection_that_breaks_with_its_worker_is_told_as_the_workers_end(killed, error):
    """One that dies while it hands over a tensor; with all workers alive it is the data set's own."""
    pool = workers.WorkerPool(Parents(), None, {"num_workers": 1}, 0)
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    pool._processes.add(process)
    if killed:
        process.kill()
    with pytest.raises(error) as caught, pool._failures_told(lambda: "batch 3"):
        raise ConnectionResetError("reset by peer")
    if killed:
        assert re.match(r"batch 3 did not come: worker process \d+ ended with SIGKILL", str(caught.value))
    assert not process.is_alive()


def test_ending_workers_on_purpose_sets_off_no_alarm():
    """Torch's own loaders install a handler of SIGCHLD for good, which raises an error about any worker that was killed."""
    alarms = []
    before = signal.signal(signal.SIGCHLD, lambda number, frame: alarms.append(number))
    try:
        processes = [multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)) for _ in range(2)]
        for process in processes:
            process.start()
        workers.kill_processes(weakref.WeakSet(processes))
        assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2
        assert alarms == []
        assert signal.getsignal(signal.SIGCHLD) not in (signal.SIG_DFL, None)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_process_with_a_stopped_worker_can_end(tmp_path):
    then = ("wait_until_worker(psutil.STATUS_STOPPED)", "sys.exit(3)")
    done, took_s = run_script(tmp_path, struck_script("SIGSTOP", {"persistent_workers": True}, *then), timeout_s=45)
    assert done.returncode == 3, done.stderr
    assert took_s < 20


SIGNALLED = """\
import os, signal, time
import hora

if __name__ == "__main__":
    asked = []
    loader = hora.DataLoader(list(range(400)), global_batch_size=8, shuffle=False, num_workers=2, rank=0, world_size=1)
    found = []
    for step in loader:
        for micro_batch in step:
            found += micro_batch.tolist()
        if step.index == 4:  # the workers were forked with the handlers that Python has by itself
            signal.signal(signal.NUMBER, lambda number, frame: asked.append(number))
            os.killpg(0, signal.NUMBER)
    assert asked == [signal.NUMBER]
    assert found == list(range(400)), found
    print(time.time())
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_to_the_whole_group_leaves_workers_to_their_rank(tmp_path, name):
    done, _took_s = run_script(tmp_path, SIGNALLED.replace("NUMBER", name))
    assert done.returncode == 0, done.stderr


class Parents(Dataset):
    """The parent of the process that loads."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return os.getppid()


@pytest.mark.parametrize("cuda_in_use", [False, True])
def test_workers_are_not_forked_from_a_process_that_uses_cuda(monkeypatch, cuda_in_use):
    loader = hora.DataLoader(Parents(), global_batch_size=4, num_workers=1, rank=0, world_size=1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda_in_use)  # the model moves to the GPU
    (parents,) = [micro_batch.tolist() for step in loader for micro_batch in step]
    assert (parents == [os.getpid()] * 4) == (not cuda_in_use)


def test_a_data_set_that_cannot_be_sent_is_refused_saying_what_to_do():
    loader = hora.DataLoader(
        Parents(), global_batch_size=4, num_workers=1, collate_fn=lambda batch: batch, multiprocessing_context="spawn", rank=0, world_size=1
    )
    with pytest.raises(ConfigError, match='can be sent to worker processes, but: .*<lambda>.* pass multiprocessing_context="fork"'):
        next(iter(next(iter(loader))))
