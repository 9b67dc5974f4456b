"""The scoreboard: trials as they are made, kept in a file of rows, so that a trial is never made twice; and as tables. Loads no torch."""

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hora.diag.bench.rows import commit, machine, versions, write_rows
from hora.diag.chaos.scenario import MEASURES, Scenario
from hora.errors import ConfigError

_HIGH = 0.95


@dataclass(frozen=True)
class Result:
    """What came of one trial that was made by `command` at `commit`, `launcher` being "hora" or "torchrun"."""

    scenario: str
    launcher: str
    variant: str
    seed: int
    numbers: dict[str, float]
    problems: list[str] = field(default_factory=list)
    command: str = ""
    commit: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """By which it is found again."""
        return self.scenario, self.launcher, self.seed


@dataclass(frozen=True)
class Skipped:
    """A trial that cannot be made here: `lacks` says why, and what to do about it. It counts neither as passed nor as failed."""

    scenario: str
    variant: str
    lacks: str


class Board:
    """The trials of `path`, and those that are made now; without a path they are not kept.

    Raises:
        ConfigError: the file holds no trials, or those of another machine or other versions, with which new ones cannot be put together.
    """

    def __init__(self, path: Path | None, command: str) -> None:
        self._path = path
        self._command, self._commit = command, commit()
        self.trials: list[Result] = _read(path) if path is not None and path.exists() else []
        self.skipped: list[Skipped] = []

    def has(self, scenario: str, launcher: str, seed: int) -> bool:
        """Whether a trial has been made."""
        return any(trial.key == (scenario, launcher, seed) for trial in self.trials)

    def add(self, trial: Result) -> None:
        """Takes a trial in, and writes the file."""
        self.trials.append(replace(trial, command=self._command, commit=self._commit))
        if self._path is not None:
            write_rows(self._path, list(self._rows()))

    def skip(self, skipped: Skipped) -> None:
        """Takes note of a trial that cannot be made; it is not kept, so that it is made when what it lacks is there."""
        if skipped not in self.skipped:
            self.skipped.append(skipped)

    def of(self, scenario: str, launcher: str) -> list[Result]:
        """The trials of a scenario."""
        return [trial for trial in self.trials if (trial.scenario, trial.launcher) == (scenario, launcher)]

    def _rows(self) -> Iterator[dict[str, Any]]:
        here = {"ranks": 2, "machine": machine(), "versions": versions()}
        for scenario, launcher in dict.fromkeys((trial.scenario, trial.launcher) for trial in self.trials):
            trials = self.of(scenario, launcher)
            what = f"chaos.{scenario}.{launcher}"
            common = here | {"command": " && ".join(dict.fromkeys(trial.command for trial in trials)), "commit": trials[-1].commit}
            passed = [float(not trial.problems) for trial in trials]
            yield {
                "what": f"{what}/passed", "value": sum(passed), "unit": f"of {len(trials)} trials", **common, "samples": passed,
                "trials": [asdict(trial) for trial in trials],
            }  # fmt: skip
            yield {"what": f"{what}/trials", "value": len(trials), "unit": "trials", **common, "samples": [len(trials)]}
            for measure in sorted({name for trial in trials for name in trial.numbers}):
                samples = numbers_of(trials, measure)
                unit = "s" if measure.endswith("_s") else "updates" if measure.endswith("steps") else "1"
                yield {"what": f"{what}/{measure}", "value": median(samples), "unit": unit, **common, "samples": samples}
                yield {"what": f"{what}/{measure} p95", "value": high(samples), "unit": unit, **common, "samples": samples}


def _read(path: Path) -> list[Result]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        trials = [Result(**trial) for row in rows for trial in row.get("trials", [])]
        here = {"machine": machine(), "versions": versions()}
        differing = [name for name, value in here.items() if any(row[name] != value for row in rows)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"--json goes on with the trials in {path}, but it holds none: {error}; name another file") from error
    if differing:
        raise ConfigError(f"{path} holds trials of another {' and other '.join(differing)}; name another file, or remove it")
    return trials


def median(samples: Sequence[float]) -> float:
    """The p50."""
    return statistics.median(samples)


def high(samples: Sequence[float]) -> float:
    """The p95: as many as 95 in 100 samples are no larger."""
    return sorted(samples)[math.ceil(_HIGH * len(samples)) - 1]


def lines(board: Board, scenarios: Sequence[Scenario]) -> Iterator[str]:
    """The table for a terminal, and what went wrong below it."""
    for scenario in scenarios:
        for launcher in ("hora", "torchrun"):
            if trials := board.of(scenario.name, launcher):
                yield f"{scenario.name:4} {launcher:8} {_count(trials):>7}  {scenario.fault}"
                yield from (f"{'':22}{line}" for line in _measures(trials, scenario if launcher == "hora" else None))
                for trial in trials:
                    yield from (f"{'':22}WRONG seed {trial.seed} ({trial.variant}): {problem}" for problem in trial.problems)
        for one in board.skipped:
            if one.scenario == scenario.name:
                yield f"{scenario.name:4} {'':8} skipped  {one.variant or scenario.fault}: {one.lacks}"


def _count(trials: Sequence[Result]) -> str:
    return f"{sum(not trial.problems for trial in trials)}/{len(trials)}"


def _measures(trials: Sequence[Result], scenario: Scenario | None) -> Iterator[str]:
    for measure, called in MEASURES.items():
        samples = numbers_of(trials, measure)
        if samples:
            wanted = scenario.wanted.get(measure) if scenario else None
            aim = "" if wanted is None else f" (aim {wanted:g})"
            yield f"{called} {median(samples):.3g}, p95 {high(samples):.3g}{' s' if measure.endswith('_s') else ''}{aim}"


def markdown(board: Board, scenarios: Sequence[Scenario], file: str) -> Iterator[str]:
    """The table for the documentation, whose figures are marked as those of the rows in `benchmarks/results/FILE.json`."""
    columns = [measure for measure in MEASURES if any(measure in trial.numbers for trial in board.trials)]
    yield "| | fault | with | passed | " + " | ".join(MEASURES[measure] for measure in columns) + " |"
    yield "|---|---|---|---|" + "---|" * len(columns)
    for scenario in scenarios:
        for launcher in ("hora", "torchrun"):
            if trials := board.of(scenario.name, launcher):
                what = f"chaos.{scenario.name}.{launcher}"
                passed = _mark(file, f"{what}/passed", sum(not trial.problems for trial in trials), 0)
                made = _mark(file, f"{what}/trials", len(trials), 0)
                cells = [_cell(file, f"{what}/{measure}", numbers_of(trials, measure)) for measure in columns]
                yield f"| {scenario.name} | {scenario.fault} | {launcher} | {passed} of {made} | {' | '.join(cells)} |"


def numbers_of(trials: Sequence[Result], measure: str) -> list[float]:
    """What has been measured, in the trials where it was."""
    return [trial.numbers[measure] for trial in trials if measure in trial.numbers]


def _cell(file: str, what: str, samples: Sequence[float]) -> str:
    if not samples:
        return ""
    unit = " s" if what.endswith("_s") else ""
    digits = 0 if what.endswith("steps") else 2
    return f"{_mark(file, what, median(samples), digits)} / {_mark(file, f'{what} p95', high(samples), digits)}{unit}"


def _mark(file: str, what: str, value: float, digits: int) -> str:
    return f'<!--row {file} what="{what}"-->{value:.{digits}f}<!--/row-->'
