"""`hora prove` as its user starts it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SPAWNING = """
import socket, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank, ranks, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in torch.randn(10, 8, 4):
        optimizer.zero_grad()
        model(batch.chunk(ranks)[rank]).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(train, (ranks, port), nprocs=ranks) if ranks > 1 else train(0, 1, port)
"""

HANGING = """
import time
import torch
import hora

hora.init()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    if step == 2 and hora.rank() == 1:
        time.sleep(600)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
"""


def hora_prove(directory: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    (directory / "train.py").write_text(script)
    environ = os.environ | {"HORA_STATE_DIR": str(directory / "state"), "OMP_NUM_THREADS": "1", "HORA_TEST_PROVE": str(directory)}
    command = [sys.executable, "-m", "hora", "prove", "--dir", "proof", *words]
    return subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=110)


@pytest.mark.timeout(120)
def test_script_that_starts_its_ranks_itself(tmp_path: Path) -> None:
    done = hora_prove(tmp_path, SPAWNING, "--steps", "3", "--json", "proof.json", "--launcher", "python", "train.py", "{ranks}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "train.py {ranks}: compared with 1 rank" in done.stdout
    assert "differs, first in step 1, in gradients between ranks: " in done.stdout
    document = json.loads((tmp_path / "proof.json").read_text())
    (answer,) = document["answers"]
    assert [finding["code"] for finding in answer["findings"]] == ["gradients-not-synchronised"]
    assert [row["step"] for row in answer["steps"]] == [1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "proof").iterdir()) == ["1-rank", "2-ranks"]


@pytest.mark.timeout(120)
def test_run_that_does_not_end_is_ended(tmp_path: Path) -> None:
    done = hora_prove(tmp_path, HANGING, "--timeout", "20", "train.py")
    assert done.returncode == 2
    assert "the run on 2 ranks had not ended after its time; steps recorded: rank 0 4, rank 1 2" in done.stderr
    assert not [process for process in psutil.process_iter() if belongs(process, tmp_path)]


@pytest.mark.timeout(120)
def test_command_that_is_terminated_ends_its_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(600)\n")
    environ = os.environ | {"HORA_STATE_DIR": str(tmp_path / "state"), "HORA_TEST_PROVE": str(tmp_path)}
    command = [sys.executable, "-m", "hora", "prove", "--dir", "proof", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        end_s = time.monotonic() + 60
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < end_s
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 143
    assert not [process for process in psutil.process_iter() if belongs(process, tmp_path)]


def belongs(process: psutil.Process, directory: Path) -> bool:
    try:
        return process.environ().get("HORA_TEST_PROVE") == str(directory)
    except psutil.Error:
        return False
