"""How long a job takes from the command to its end, under Hora's launcher and under torchrun.

One job is a plain script of torch.distributed (Gloo, one all-reduce of one number) that knows nothing of either launcher; the other does nothing at
all, so that what is measured is the launcher itself.
"""

import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from hora.diag.bench.registry import Sample, Workload, register
from hora.errors import LaunchError

RANKS = 2

LAUNCHERS = {
    "hora run": ("hora.launch", "-np", str(RANKS)),
    "torchrun": ("torch.distributed.run", "--nproc-per-node", str(RANKS)),
    "torchrun --standalone": ("torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
}

ALL_REDUCE = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
assert tensor.item() == dist.get_world_size()
dist.destroy_process_group()
"""

_TIMEOUT_S = 300.0
_GRACE_S = 40.0  # torchrun gives ranks 30 s


def run_job(launcher: tuple[str, ...], source: str) -> float:
    """Seconds that a job takes whose ranks run the Python text `source`.

    Raises:
        LaunchError: the job failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "script.py"
        script.write_text(source, encoding="utf-8")
        begin = time.perf_counter()
        exit_code, errors = _run([sys.executable, "-m", *launcher, str(script)])
        elapsed_s = time.perf_counter() - begin
    if exit_code != 0:
        raise LaunchError(f"the job under {launcher[0]} ended with exit code {exit_code}: {errors.strip()[-500:]}")
    return elapsed_s


def _run(command: list[str]) -> tuple[int, str]:
    """Exit code and standard error of a launcher. When this process is to end first, it is asked to end its ranks: killed, torchrun leaves them."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, errors = process.communicate(timeout=_TIMEOUT_S)
        except BaseException:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            process.kill()
            raise
    return process.returncode, errors


def _register(name: str, summary: str, source: str) -> None:
    workload = register(Workload(name, summary, unit="s", ranks=RANKS))
    for variant, launcher in LAUNCHERS.items():
        workload.variant(variant)(_sample(launcher, source))


def _sample(launcher: tuple[str, ...], source: str) -> Sample:
    return lambda: run_job(launcher, source)


_register("launch.all_reduce", "a Gloo job that does one all-reduce and ends, wall time", ALL_REDUCE)
_register("launch.trivial", "a job that does nothing, wall time", "pass\n")
