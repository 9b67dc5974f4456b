"""Backend mpi on ranks that MPICH's mpiexec and Hora's launcher start. One start of the ranks checks everything; see `mpi_everything`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install 'hora[mpi]'")

MPIEXEC = Path(sys.executable).parent / "mpiexec"
EVERYTHING = Path(__file__).parent / "mpi_everything.py"
PTDIST = Path(__file__).parents[1] / "examples" / "scripts" / "ptdist.py"
TIMEOUT_S = 100


def run(tmp_path: Path, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HORA_", "RANK", "WORLD_SIZE", "PMI"))}
    environ |= {"HORA_STATE_DIR": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)


def lines(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode == 0, result.stdout + result.stderr
    return sorted(result.stdout.splitlines())


def mpiexec(size: int, *words: str | Path) -> tuple[str | Path, ...]:
    return (MPIEXEC, "-n", str(size), sys.executable, "-W", "error", *words)


def hora_run(size: int, *words: str | Path) -> tuple[str | Path, ...]:
    return (sys.executable, "-m", "hora.launch", "--mpi", "-np", str(size), *words)


CHECKS = sorted(f"ok {name}" for name in re.findall(r"^def (\w+)\(\) -> None:$", EVERYTHING.read_text(), re.MULTILINE))


def test_everything_under_mpiexec_where_threads_take_turns(tmp_path):
    assert lines(run(tmp_path, *mpiexec(3, EVERYTHING), MPI4PY_RC_THREAD_LEVEL="serialized")) == CHECKS


def test_everything_across_the_network(tmp_path):
    """To MPICH, two names are two nodes."""
    program, *words = mpiexec(2, EVERYTHING)
    assert lines(run(tmp_path, program, "-launcher", "fork", "-hosts", "localhost,127.0.0.1", "-ppn", "1", *words)) == CHECKS


def test_everything_under_hora_run(tmp_path):
    assert [line.removeprefix("[0] ") for line in lines(run(tmp_path, *hora_run(4, EVERYTHING)))] == CHECKS


SENT = ["Rank-0 has sent the following tensor to Rank-1", "Rank-1 has received the following tensor from Rank-0: [1.0, -1.0]"]


def test_script_that_knows_only_torch_runs_unchanged(tmp_path):
    """Under `hora run --mpi`, and under mpiexec: with any number of ranks it trains the same model."""
    by_hora = lines(run(tmp_path, *hora_run(2, PTDIST)))
    by_mpiexec = lines(run(tmp_path, *mpiexec(3, "-m", "hora.mpi", PTDIST)))
    assert [line[4:] for line in by_hora if "sent" in line or "received" in line] == SENT == by_mpiexec[:2]
    assert [line[4:] for line in by_hora if "loss" in line] == by_mpiexec[2:]


INIT = """
import sys, torch, torch.distributed as dist, hora
session = hora.init(**({"backend": sys.argv[1]} if len(sys.argv) > 1 else {}), device="cpu", timeout_s=60)
total = hora.all_reduce(torch.ones(1)).item()
hora.shutdown()
again = hora.init(**({"backend": sys.argv[1]} if len(sys.argv) > 1 else {}), device="cpu", timeout_s=60)
hora.barrier()
sys.stdout.write(f"{session.rank} {session.topology.source} {session.backend} {total:.0f}\\n")
"""


def test_init_meets_through_mpi(tmp_path):
    (tmp_path / "init.py").write_text(INIT)
    assert lines(run(tmp_path, *mpiexec(2, "init.py", "mpi"))) == ["0 mpich mpi 2", "1 mpich mpi 2"]
    assert not (tmp_path / "state").exists()  # the key went through MPI


# As in Horovod's manual: each rank gives a communicator of its own.
HOROVOD = """
from mpi4py import MPI
import hora.hvd as hvd
mine = hvd.ProcessSet(MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2))
hvd.init(comm=MPI.COMM_WORLD, process_sets=[mine])
assert mine.ranks == [hvd.rank()]
assert hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Sum, process_set=mine).item() == hvd.rank()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
assert (hvd.mpi_built(), hvd.mpi_enabled(), hvd.gloo_enabled(), hvd.mpi_threads_supported()) == (True, True, False, True)
hvd.barrier()
hvd.shutdown()
"""


def test_init_chooses_mpi_under_hora_run(tmp_path):
    (tmp_path / "init.py").write_text(INIT + HOROVOD)
    assert lines(run(tmp_path, *hora_run(2, "init.py"))) == ["[0] 0 hora mpi 2", "[1] 1 hora mpi 2"]
