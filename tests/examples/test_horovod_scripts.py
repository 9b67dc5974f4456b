"""Scripts for Horovod, unchanged, through the real command."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hora.recipes.lm.text import EXCERPT

ROOT = Path(__file__).parents[2]
HORA = [sys.executable, "-m", "hora", "run", "--horovod", "-np", "2"]


def run(words: list[str], directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"HORA_STATE_DIR": str(directory / "state"), "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(words, cwd=directory, env=environ, capture_output=True, text=True, timeout=100, check=False)


def test_the_example_trains_and_writes_a_timeline(tmp_path: Path) -> None:
    words = (EXCERPT / "train.txt").read_text(encoding="utf-8").split()[:3000]
    (tmp_path / "text.txt").write_text(" ".join(words), encoding="utf-8")
    script = [str(ROOT / "examples" / "horovod" / "lstm.py"), "--data", "text.txt", "--hidden", "32", "--checkpoint", "model.pt"]
    result = run([*HORA, *script], tmp_path, HOROVOD_TIMELINE="timeline.json")
    assert result.returncode == 0, result.stdout + result.stderr
    first, last = (float(found) for found in re.findall(r"perplexity ([\d.]+)", result.stdout))
    assert last < first < 1500
    assert (tmp_path / "model.pt").exists()
    events = json.loads((tmp_path / "timeline.json").read_text())
    kinds = {event.get("name") for event in events}
    assert {"MEMCPY_IN_FUSION_BUFFER", "SHM_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"} <= kinds
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "NEGOTIATE_BROADCAST", "process_name", "process_sort_index", "0", "1"} <= kinds
    assert any(event.get("args", {}).get("name", "").startswith("allreduce.average_loss") for event in events)
    begun, ended = (sum(event["ph"] == phase for event in events) for phase in "BE")
    assert begun == ended > 20


SCRIPT = """\
import json, logging, os, multiprocessing, sys

import horovod
import horovod.torch as hvd
import horovod.torch.mpi_ops
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average


def child(queue):
    import horovod.torch

    queue.put(horovod.torch.__name__)


if __name__ == "__main__":
    hvd.init()
    names = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"]
    mine = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    assert [int(os.environ[f"HOROVOD_{name}"]) for name in names] == mine
    assert os.environ["HOROVOD_HOSTNAME"]
    assert (hvd.Compression, hvd.Average, hvd.HorovodInternalError) == (Compression, Average, HorovodInternalError)
    assert horovod.torch.mpi_ops.rank is hvd.rank
    for missing in ("horovod.tensorflow", "horovod.torch.keras"):
        try:
            __import__(missing)
        except ModuleNotFoundError as error:
            assert "hora answers for Horovod's PyTorch API" in str(error)
        else:
            raise SystemExit(f"{missing} was found")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    if hvd.rank() == 0:
        process.start()
        assert queue.get(timeout=60) == "hora.hvd"
        process.join()
    assert os.environ["HOROVOD_CYCLE_TIME"] == "2"
    assert logging.getLogger("hora").level == logging.ERROR
    print(f"stdout of {hvd.rank()}")
    print(f"stderr of {hvd.rank()}", file=sys.stderr)
    hvd.barrier()
"""


def test_imports_of_horovod_are_answered_in_ranks_and_in_their_children(tmp_path: Path) -> None:
    """By a line of horovodrun as it stands: exactly two ranks, of the three for which there is room."""
    (tmp_path / "script.py").write_text(SCRIPT)
    line = [
        "-np",
        "2",
        "-H",
        "localhost:3",
        "--start-timeout",
        "90",
        "--output-filename",
        "out",
        "--log-level",
        "ERROR",
        "--cycle-time-ms",
        "2",
        "python",
        "script.py",
    ]
    result = run([sys.executable, "-m", "hora.cli.horarun", *line], tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    kept = {path.relative_to(tmp_path / "out").as_posix(): path.read_text() for path in (tmp_path / "out").rglob("std*")}
    assert kept == {f"rank.{rank}/{name}": f"{name} of {rank}\n" for rank in range(2) for name in ("stdout", "stderr")}
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] stdout of {rank}" for rank in range(2)]


CALLED = """import horovod.torch as hvd
import torch


def total(value, scale):
    hvd.init()
    return [hvd.rank(), hvd.allreduce(torch.tensor([value]), op=hvd.Sum) * scale]
"""

CALLING = """from hora.hvd import hook

hook.install()
import horovod
from horovod.runner import run

from called_by_name import total

assert run is horovod.run
results = horovod.run(total, (1.5,), {"scale": 10}, np=2, hosts="localhost:2", use_gloo=True)
assert [(rank, tensor.tolist()) for rank, tensor in results] == [(0, [30.0]), (1, [30.0])], results
"""


def test_a_function_is_called_on_ranks(tmp_path: Path) -> None:
    (tmp_path / "called_by_name.py").write_text(CALLED)
    (tmp_path / "calling.py").write_text(CALLING)
    result = run([sys.executable, "calling.py"], tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


ALL_THREE = """\
import sys

sys.path.insert(0, sys.argv[1])
import cifar
import cifar_ddp
import cifar_hora

size = "--images 64 --train-batch 16 --depth 8 --width 4 --epochs 3 --schedule 2 --lr 0.05".split()
for script in (cifar, cifar_hora, cifar_ddp):
    script.main([*size, "--losses", f"{script.__name__}.json"])
"""


def test_cifar_has_the_same_losses_by_horovods_words_by_horas_and_by_torchs(tmp_path: Path) -> None:
    (tmp_path / "all_three.py").write_text(ALL_THREE)
    result = run([*HORA, "all_three.py", str(ROOT / "examples" / "horovod")], tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("Epoch[3/3]: LR: 0.005, ") == 3
    theirs, *ours = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("cifar_ddp", "cifar", "cifar_hora"))
    first, last = theirs[0][1], theirs[-1][1]
    assert last < first, "it learns"
    for rows in ours:
        assert [pytest.approx(row, rel=1e-4) for row in rows] == theirs


def test_without_the_word_there_is_no_horovod(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import horovod.torch\n")
    result = run([word for word in HORA if word != "--horovod"] + ["script.py"], tmp_path)
    assert result.returncode == 1
    assert "No module named 'horovod'" in result.stdout + result.stderr
