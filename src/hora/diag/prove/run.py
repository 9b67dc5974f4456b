"""Starts the script on a number of ranks with recording switched on, and reads what was recorded."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from hora import env
from hora.diag.prove.records import Run, read_run
from hora.diag.prove.request import Request
from hora.errors import ConfigError, HoraError
from hora.launch.started import launcher

SITE: Final = Path(__file__).parent / "site"
_GRACE_S: Final = 5.0
_TAIL_LINES: Final = 15


class ProveError(HoraError):
    """The runs could not be compared; says why."""


@dataclass(frozen=True)
class Start:
    """One run to be started.

    Attributes:
        words: the script with its arguments.
        launcher: a command in place of Hora's launcher.
        environ: variables of the processes, complete.
        directory: for logs; empty.
    """

    words: Sequence[str]
    ranks: int
    module: bool
    exact: bool
    launcher: str | None
    environ: Mapping[str, str]
    directory: Path
    timeout_s: float


@dataclass(frozen=True)
class Ended:
    """How a run ended: exit code (None: it was ended at its deadline), and the last lines that it printed."""

    exit_code: int | None
    tail: str = ""


class Starter(Protocol):
    """Runs a script; tests have another than the command."""

    def __call__(self, start: Start) -> Ended:
        """Runs it to its end. Nothing that it started is left behind."""


def start_with_hora_run(start: Start) -> Ended:
    """Starts the ranks with `hora run`, in a process of its own."""
    output = start.directory / "output.txt"
    with output.open("wb") as file:
        started = launcher(run_words(start), grace_s=_GRACE_S, environ=start.environ, stdout=file, stderr=subprocess.STDOUT)
        with started as process:
            try:
                exit_code: int | None = process.wait(start.timeout_s)
            except subprocess.TimeoutExpired:
                exit_code = None
    return Ended(exit_code, _tail(output))


def run_words(start: Start) -> list[str]:
    """The words of `hora run`."""
    options = ["--quiet", "--log-dir", str(start.directory / "logs")]
    if start.launcher is not None:
        return ["-np", "1", *options, "--no-python", *_launched(start)]
    options += ["--exact"] * start.exact + ["-m"] * start.module
    return ["-np", str(start.ranks), *options, *start.words]


def _launched(start: Start) -> list[str]:
    """The user's launcher as a program that sees no rank of Hora's: the one process that Hora starts is no rank."""
    assert start.launcher is not None
    hidden = ["env", *(word for name in _PLACE_VARIABLES for word in ("-u", name))]
    return [*hidden, *shlex.split(start.launcher), *["-m"] * start.module, *start.words]


_PLACE_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    env.RENDEZVOUS, env.NODE_RANK, env.NUM_NODES,
)  # fmt: skip


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])


@dataclass
class Runner:
    """Makes the runs of one request; each kind of run once.

    Args:
        request: what was asked.
        starter: how a run is started.
        environ: variables of the script.
    """

    request: Request
    starter: Starter = start_with_hora_run
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def run(self, ranks: int, *, steps: int | None = None, without: Sequence[str] = (), again: bool = False) -> Run:
        """Runs the script and returns what was recorded.

        Raises:
            ProveError: the script failed, did not end in time, or trained in no way that can be seen.
        """
        steps = self.request.steps if steps is None else steps
        directory = self.request.directory / _name(ranks, without, again=again, steps=None if steps == self.request.steps else steps)
        records = directory / "records"
        if directory.exists():
            raise ConfigError(f"--dir must be a directory that no proof was left in, but {directory} is there; give another, or remove it")
        records.mkdir(parents=True)
        start = Start(
            words=self.request.words_for(ranks),
            ranks=ranks,
            module=self.request.module,
            exact=self.request.exact,
            launcher=self.request.launcher_for(ranks),
            environ=self._environ(records, steps, without),
            directory=directory,
            timeout_s=self.request.timeout_s,
        )
        ended = self.starter(start)
        run = read_run(records, ranks)
        _require_success(run, ended, steps, directory)
        self._require_exact(run)
        return run

    def _require_exact(self, run: Run) -> None:
        if self.request.exact and not all(record.notes.get("exact") for record in run.at(1)):
            raise ProveError(
                "--exact needs a script that joins Hora in exact mode, but this one did not: call hora.init(), and not hora.init(exact=False)"
            )

    def _environ(self, records: Path, steps: int, without: Sequence[str]) -> dict[str, str]:
        path = [str(SITE), *filter(None, self.environ.get("PYTHONPATH", "").split(os.pathsep))]
        # A launcher such as `python` or `torchrun` is this Python's.
        programs = [os.path.dirname(sys.executable), *filter(None, [self.environ.get("PATH")])]
        return {
            **self.environ,
            **({} if self.request.launcher is None else {"PATH": os.pathsep.join(programs)}),
            "PYTHONPATH": os.pathsep.join(path),
            env.PROVE: str(records.resolve()),
            env.PROVE_STEPS: str(steps),
            env.PROVE_WITHOUT: ",".join(without),
        }


def _name(ranks: int, without: Sequence[str], *, again: bool, steps: int | None) -> str:
    parts = [f"{ranks}-rank{'s' if ranks > 1 else ''}", *(["again"] if again else []), *(f"without-{what}" for what in without)]
    return "-".join([*parts, *([f"{steps}-steps"] if steps is not None else [])])


class RunFailed(ProveError):
    """A run of the script failed or was ended; `run` is what it had recorded by then."""

    def __init__(self, message: str, run: Run):
        super().__init__(message)
        self.run = run


def _require_success(run: Run, ended: Ended, steps: int, directory: Path) -> None:
    what = f"the run on {run.ranks} rank{'s' if run.ranks > 1 else ''}"
    counts = run.steps_by_rank
    through = len(run.ends) == run.ranks
    if through and all(count == steps for count in counts.values()):
        return  # whatever the script did on its way out
    recorded = ", ".join(f"rank {rank} {count}" for rank, count in counts.items()) or "none"
    if ended.exit_code is None:
        raise RunFailed(
            f"{what} had not ended after its time; steps recorded: {recorded}. Give more with --timeout, or see {directory}", run
        )
    if ended.exit_code != 0:
        raise RunFailed(
            f"{what} failed with exit code {ended.exit_code}; steps recorded: {recorded}. Its last lines (all are in {directory}):\n{ended.tail}",
            run,
        )
    if not run.records:
        raise RunFailed(f"{what} made no step of a torch optimizer, or its processes were not those of this Python; see {directory}", run)
    if len(run.records) != run.ranks:
        raise RunFailed(
            f"{what} must have as many ranks as --ranks says, but {len(run.records)} recorded steps: does the script join the others "
            f"(hora.init, init_process_group), and does its launcher get {{ranks}}? See {directory}",
            run,
        )
