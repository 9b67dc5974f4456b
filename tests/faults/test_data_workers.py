"""Worker processes of a loader that are killed, stopped, stuck or hit by the group's signals."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

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


FORKSERVER_KILLED = """\
import os, signal, time
import hora
from torch.utils.data import Dataset

class Numbers(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return index

if __name__ == "__main__":
    loader = hora.DataLoader(
        Numbers(), global_batch_size=8, micro_batch_size=1, shuffle=False, num_workers=1, multiprocessing_context="forkserver",
        prefetch_factor=1, rank=0, world_size=1,
    )
    for step in loader:
        for micro_batch in step:
            last = time.time()
            print(int(micro_batch), last, flush=True)
"""


def test_a_killed_worker_that_was_not_forked_is_noticed_long_before_the_timeout(tmp_path):
    done, took_s = run_script(tmp_path, FORKSERVER_KILLED)
    assert "step 1 of epoch 0 (samples 13 of the data set) did not come: worker process" in done.stderr, done.stderr
    assert done.returncode == 1
    assert "ended with SIGKILL" in done.stderr
    assert took_s < 10


STUCK_AT_EXIT = """\
import os, signal, sys, time
import hora
from torch.utils.data import Dataset

class Numbers(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index == 13:
            os.kill(os.getpid(), signal.SIGSTOP)
        return index

if __name__ == "__main__":
    loader = hora.DataLoader(
        Numbers(), global_batch_size=8, shuffle=False, num_workers=1, prefetch_factor=1, persistent_workers=True, rank=0, world_size=1
    )
    steps = iter(loader)
    print(next(steps), time.time(), flush=True)
    sys.exit(3)
"""


def test_a_process_with_a_stopped_worker_can_end(tmp_path):
    done, took_s = run_script(tmp_path, STUCK_AT_EXIT, timeout_s=45)
    assert done.returncode == 3, done.stderr
    assert took_s < 20


SIGNALLED = """\
import os, signal, time
import hora

if __name__ == "__main__":
    asked = []
    signal.signal(signal.NUMBER, lambda number, frame: asked.append(number))
    loader = hora.DataLoader(list(range(400)), global_batch_size=8, shuffle=False, num_workers=2, rank=0, world_size=1)
    found = []
    for step in loader:
        for micro_batch in step:
            found += micro_batch.tolist()
        if step.index == 4:
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
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda_in_use)
    loader = hora.DataLoader(Parents(), global_batch_size=4, num_workers=1, rank=0, world_size=1)
    (parents,) = [micro_batch.tolist() for step in loader for micro_batch in step]
    assert (parents == [os.getpid()] * 4) == (not cuda_in_use)


def test_a_data_set_that_cannot_be_sent_is_refused_saying_what_to_do():
    loader = hora.DataLoader(
        Parents(), global_batch_size=4, num_workers=1, collate_fn=lambda batch: batch, multiprocessing_context="spawn", rank=0, world_size=1
    )
    with pytest.raises(ConfigError, match='can be sent to worker processes, but: .*<lambda>.* pass multiprocessing_context="fork"'):
        next(iter(next(iter(loader))))
