"""Scripts that Hora's launcher did not start: they start their ranks themselves, or torchrun does."""

import os
import socket
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 100


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start(tmp_path: Path, *command: str, **variables: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environ |= {"HORA_STATE_DIR": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"} | variables
    return subprocess.Popen(command, cwd=tmp_path, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def lines(*processes: subprocess.Popen[str]) -> list[str]:
    """What the processes print on standard output, sorted; they must all succeed."""
    results = [(*process.communicate(timeout=TIMEOUT_S), process.returncode) for process in processes]
    assert [code for _, _, code in results] == [0] * len(processes), results
    return sorted(line for output, _, _ in results for line in output.splitlines())


def python(script: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-W", "error", str(SCRIPTS / script), *arguments)


def test_script_that_spawns_its_ranks(tmp_path):
    urls = {"1": "env://", "2": f"tcp://127.0.0.1:{free_port()}"}
    jobs = [start(tmp_path, *python("spawned_by_the_script.py", "--dist-url", url, "--world-size", n)) for n, url in urls.items()]
    found = [line.split() for line in lines(*jobs)]
    assert [words[3] for words in found] == list(urls)
    assert len({words[1] for words in found}) == 1


def test_script_that_is_started_once_a_node(tmp_path):
    port = free_port()
    nodes = [
        start(tmp_path, *python("nodes_and_gpus.py", "--nodes", "2", "--gpus", "2", "--nr", str(node), "--master-port", port))
        for node in (1, 0)
    ]
    assert lines(*nodes) == [f"rank {rank} of 4 found 6" for rank in range(4)]


SENT = ["Rank-0 has sent the tensor to Rank-1", "Rank-1 has received [1.0, -1.0] from Rank-0"]


def torchrun(script: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPTS / script))


def test_script_under_torchrun(tmp_path):
    assert lines(start(tmp_path, *torchrun("send_and_receive.py"))) == SENT


def test_script_that_uses_torch_distributed_itself_under_torchrun(tmp_path):
    assert lines(start(tmp_path, *torchrun("joined_by_torch.py"))) == [f"rank {rank} of 2: torchrun, 1.5" for rank in (0, 1)]
