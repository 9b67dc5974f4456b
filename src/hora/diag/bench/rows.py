"""Measurements as rows for a file: the value with all that is needed to measure it again.

Every row has the keys `what value unit ranks machine versions command commit samples`; `value` is the median of `samples`. Writes JSON,
loads nothing heavy.
"""

import json
import os
import platform
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hora.diag.bench.registry import Measurement
from hora.launch.host import processor_name

_PACKAGES = ("hora", "torch", "numpy")


def rows(measurements: Sequence[Measurement], command: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each measurement, taken on this machine by `command`."""
    return [
        {
            "what": f"{measurement.workload.name}/{measurement.variant}",
            "value": measurement.median,
            "unit": measurement.workload.unit,
            "ranks": measurement.workload.ranks,
            "machine": machine(),
            "versions": versions(),
            "command": shlex.join(command),
            "commit": commit(),
            "samples": list(measurement.samples),
        }
        for measurement in measurements
    ]


def write_rows(path: Path, content: Sequence[dict[str, Any]]) -> None:
    """Writes rows as JSON; the file appears whole or not at all.

    Raises:
        ConfigError: it cannot be written there.
    """
    from hora.train.files import write_result

    write_result(path, (json.dumps(content, indent=1) + "\n").encode())


def machine() -> str:
    """The GPUs if there are any, the processor and how many of its cores this process may use, and the system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_gpus()}{processor_name()}, {cores} cores, {platform.system()} {platform.machine()}"


def _gpus() -> str:
    """`2 x NVIDIA H100 80GB HBM3, `, as the driver names them; nothing without a driver."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.split("\n")
    return "".join(f"{count} x {name}, " for name, count in Counter(filter(None, names)).items())


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, read without importing them."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in _PACKAGES}


def commit() -> str:
    """The commit of the checkout that runs, with `-dirty` when it has been changed since; "unknown" outside a checkout."""
    where = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-c", "safe.directory=*", "-C", str(where), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
