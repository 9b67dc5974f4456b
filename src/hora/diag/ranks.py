"""Starts the ranks of a bench with `hora run`, in a process of its own, and reads what they have measured. Loads no torch."""

import json
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from hora.errors import HoraError
from hora.launch.started import launcher

WRONG: Final = "wrong"
"""Key of what ranks say instead of a point when a sum was wrong."""

_GRACE_S: Final = 5.0
_LOOK_S: Final = 0.2
_STDERR: Final = 2


def start_ranks(module: str, request: str, num_ranks: int, on_point: Callable[[dict[str, Any]], None]) -> None:
    """Starts `num_ranks` ranks of `python -m module request RESULTS`; tells each point that rank 0 writes to RESULTS, a line of JSON, at once.

    What the ranks and the launcher print goes to this process's error output. Nothing that was started is left behind.

    Raises:
        HoraError: a sum was wrong, or the ranks have failed.
    """
    with tempfile.TemporaryDirectory(prefix="hora-bench-") as directory:
        results = Path(directory) / "results.jsonl"
        words = ["-np", str(num_ranks), "--quiet", "-m", module, request, str(results)]
        with launcher(words, grace_s=_GRACE_S, stdout=_STDERR) as process:
            exit_code = _follow(process, results, on_point)
    if exit_code != 0:
        raise HoraError(f"the ranks have ended with exit code {exit_code}; what they said stands above")


def _follow(process: "subprocess.Popen[bytes]", results: Path, on_point: Callable[[dict[str, Any]], None]) -> int:
    """Tells the points until the process has ended; its exit code."""
    num_told = 0
    exit_code: int | None = None
    while exit_code is None:
        with suppress(subprocess.TimeoutExpired):
            exit_code = process.wait(_LOOK_S)
        for point in read_results(results)[num_told:]:
            on_point(point)
            num_told += 1
    return exit_code


def read_results(path: Path) -> list[dict[str, Any]]:
    """The points of the lines that have been written to their end.

    Raises:
        HoraError: a sum was wrong.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    points: list[dict[str, Any]] = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    for point in points:
        if WRONG in point:
            raise HoraError(point[WRONG])
    return points
