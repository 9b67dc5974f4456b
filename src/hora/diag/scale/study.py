"""The runs of a study, in turns: each leaves the report of its steps."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hora import env
from hora.diag.prove.run import Ended, Start, Starter, start_with_hora_run
from hora.diag.scale.point import Point, point_of
from hora.diag.scale.request import Request
from hora.diag.scale.wire import Sum, sums_of
from hora.errors import HoraError
from hora.launch import host
from hora.launch.plan import threads_per_rank

_SIZES = ("4K", "64K", "1M", "4M", "16M")
_BENCH_TIMEOUT_S = 300.0
_NUMBERS = frozenset({"ranks", "nodes", "bytes", "median_us"})


class ScaleError(HoraError):
    """The script could not be measured; says why."""


@dataclass
class Study:
    """Makes the runs of one request.

    Args:
        request: what was asked.
        say: is told what is going on.
        starter: how a run is started.
    """

    request: Request
    say: Callable[[str], None] = lambda _: None
    starter: Starter = start_with_hora_run
    _reports: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def measure(self) -> list[Point]:
        """All points, by number of ranks.

        Raises:
            ScaleError: a run failed, or made no step that Hora sees.
        """
        for repeat in range(self.request.repeats):
            ranks = self.request.ranks if repeat % 2 == 0 else self.request.ranks[::-1]
            for number in ranks:
                self.say(f"{number} rank{'s' if number > 1 else ''}, run {repeat + 1} of {self.request.repeats}")
                self._reports.setdefault(number, []).append(self._run(number, repeat))
        return [point_of(number, self._reports[number]) for number in sorted(self._reports)]

    def _run(self, ranks: int, repeat: int) -> dict[str, Any]:
        directory = self.request.directory / f"{ranks}-ranks-{repeat + 1}"
        try:
            directory.mkdir(parents=True)
        except OSError as error:
            raise ScaleError(f"{directory} cannot be made: {error.strerror}; give --dir a directory that no study was left in") from error
        report = directory / "report.json"
        # The same number of threads for each number of ranks: else the work of a rank would be another one's.
        threads = str(threads_per_rank(host.count_cores(), max(self.request.ranks)))
        environ = {"OMP_NUM_THREADS": threads, **os.environ, env.REPORT_JSON: str(report.absolute())}
        start = Start(
            words=self.request.words_for(ranks), ranks=ranks, module=self.request.module, exact=False, launcher=None, environ=environ,
            directory=directory, timeout_s=self.request.timeout_s,
        )  # fmt: skip
        return read_report(report, self.starter(start), ranks, directory)


def read_report(report: Path, ended: Ended, ranks: int, directory: Path) -> dict[str, Any]:
    """What a run has left.

    Raises:
        ScaleError: it has left nothing that can be used.
    """
    what = f"the run on {ranks} rank{'s' if ranks > 1 else ''}"
    if ended.exit_code is None:
        raise ScaleError(f"{what} had not ended after its time; give more with --timeout, or fewer steps; see {directory}")
    if ended.exit_code != 0:
        raise ScaleError(f"{what} failed with exit code {ended.exit_code}. Its last lines (all are in {directory}):\n{ended.tail}")
    if not report.exists():
        raise ScaleError(
            f"{what} must make steps with hora.DistributedOptimizer or hora.TrainStep, and end its session with hora.shutdown(), but left no report "
            f"of any; see {directory}"
        )
    found = json.loads(report.read_text(encoding="utf-8"))
    if found["world_size"] != ranks:
        raise ScaleError(f"{what} must have as many ranks as --ranks says, but trained on {found['world_size']}; does it call hora.init()?")
    assert isinstance(found, dict)
    return found


def measure_sums(points: list[Point], directory: Path) -> list[Mapping[str, Any]]:
    """Rows of `hora bench allreduce` for the backend and the numbers of ranks of `points`; none where it does not know that backend."""
    last = max(points, key=lambda point: point.ranks)
    ranks = [str(point.ranks) for point in points if point.ranks > 1]
    if last.backend not in ("gloo", "shm", "nccl") or not ranks:
        return []
    rows = directory / "allreduce.json"
    words = ["--ranks", ",".join(ranks), "--backends", last.backend, "--algorithms", "native", "--sizes", ",".join(_SIZES), "--rounds", "5"]
    with (directory / "allreduce.log").open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-m", "hora.cli.main", "bench", "allreduce", *words, "--json", str(rows)],
            stdout=log, stderr=subprocess.STDOUT, timeout=_BENCH_TIMEOUT_S, check=False,
        )  # fmt: skip
    if done.returncode != 0:
        raise ScaleError(
            f"hora bench allreduce failed with exit code {done.returncode}; see {directory / 'allreduce.log'}, or give rows with --timings"
        )
    return read_timings(rows)


def read_timings(path: Path) -> list[Mapping[str, Any]]:
    """The rows of a file of `hora bench allreduce --json`.

    Raises:
        ScaleError: it is no such file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in found if row.keys() >= _NUMBERS]
        if not rows:
            raise ValueError("it has no row of a sum")
        if not all(0 < row[number] < math.inf for row in rows for number in _NUMBERS):
            raise ValueError(f"{', '.join(sorted(_NUMBERS))} must be numbers above 0")
        return rows
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ScaleError(f"--timings must be a file of `hora bench allreduce --json`, but {path} is none: {error}") from None


def require_sums(rows: Sequence[Mapping[str, Any]], backend: str, device: str) -> list[Sum]:
    """Those of `rows` that tell something of a script's sums, as `sums_of` finds them.

    Raises:
        ScaleError: there are none.
    """
    sums = sums_of(rows, backend, device)
    if not any(one.ranks > 1 for one in sums):
        has = sorted({f"{row.get('backend')} on {row.get('device')} ({row.get('algorithm')})" for row in rows})
        raise ScaleError(
            f"--timings must hold sums of the backend that the script uses, {backend} on {device}, by its own algorithm (native), but holds "
            f"those of {', '.join(has)}; add rows of `hora bench allreduce --backends {backend} --algorithms native`, or have the script use "
            "the other backend"
        )
    return sums
