"""What this node has: cores, GPUs, room for processes; and whether its kernel killed a process for want of memory.

Reads `/proc`, `/sys` and, for GPUs, `nvidia-smi` where the driver says nothing; loads no GPU library.
"""

import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from hora import env
from hora.errors import ConfigError

if sys.platform != "win32":
    import resource

_GPU_NAME = re.compile(r"\d|GPU-|MIG-")
_NVIDIA_SMI_S = 20.0
_DESCRIPTORS_PER_RANK = 8
_DESCRIPTORS_SPARE = 64


def count_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: those it is bound to, or fewer where its control group has a smaller share of time."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(root)
    return bound if quota is None else max(1, min(bound, math.ceil(quota)))


def _quota(root: Path) -> float | None:
    """Processors' worth of time that the control group grants, or one around it, whichever is least."""
    groups = {"": "/", "cpu": "/"}  # also where nothing is said of them: in a container they are the outermost that are seen
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        groups |= {known: group for known in groups if known in controllers.split(",")}
    granted = []
    for controller, group in groups.items():
        outermost = root / "sys/fs/cgroup" / controller
        for place in (group, *PurePosixPath(group).parents):
            directory = outermost / str(place).lstrip("/")
            new = _read(directory / "cpu.max").split()
            old = [_read(directory / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
            quota, period = new if len(new) == 2 else old
            if quota.isdigit() and period.isdigit() and int(period):
                granted.append(int(quota) / int(period))
    return min(granted, default=None)


def count_gpus(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """GPUs that CUDA would show to a process with this environment."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA takes the names up to the first that is none; Slurm writes NoDevFiles for no GPU.
        return next((index for index, name in enumerate(names) if not _GPU_NAME.match(name)), len(names))
    driver = root / "proc/driver/nvidia/gpus"
    return len(list(driver.iterdir())) if not env.portable_only() and driver.is_dir() else _count_by_nvidia_smi()


def _count_by_nvidia_smi() -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def make_room(num_ranks: int) -> None:
    """Raises this process's limit of open files to what so many ranks need.

    Raises:
        ConfigError: the system does not allow so many.
    """
    if sys.platform == "win32":
        return
    needed = num_ranks * _DESCRIPTORS_PER_RANK + _DESCRIPTORS_SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(
            f"{num_ranks} ranks on one node need {needed} open files here, but the limit is {hard}; start fewer, or raise it (`ulimit -Hn`)"
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def count_memory_kills(root: Path = Path("/")) -> int | None:
    """How many processes of this control group the kernel has killed for want of memory so far; None if it cannot be read."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            groups, name = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            groups, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        # In a container the group may be called as on the host, but be the outermost that is seen.
        for place in (groups / group.lstrip("/"), groups):
            counts = dict(entry.split() for entry in _read(place / name).splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None


def _read(path: Path) -> str:
    """What a file of the Linux kernel says; nothing elsewhere."""
    if env.portable_only():
        return ""
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeError):
        return ""


def processor_name() -> str:
    """The model of the processor, as the system names it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or "unknown processor"
