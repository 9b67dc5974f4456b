"""`hora demo`: trains the same small model with 2 ranks and with 1, and shows that they are the same."""

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from hora.cli.train_lm import LmRequest, start_ranks
from hora.errors import HoraError
from hora.launch.report_words import require_writable

RANKS = (2, 1)


_HELP = """Trains a small LSTM language model on an excerpt of WikiText-2, once with 2 ranks and once with 1, and compares the two.

Exits with 1 unless every perplexity is the same to 4 significant digits.

\b
hora demo
"""


@click.command("demo", help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--run-dir", type=click.Path(path_type=Path), metavar="DIR", help="Directory of both runs. [runs/demo-TIME]")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Overrides a setting, `epochs=1`.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the two curves.")
def command(run_dir: Path | None, overrides: tuple[str, ...], json_file: Path | None) -> int:
    """Runs the two, shows them, and says whether they agree."""
    from hora.launch import host  # here, so that --help is answered at once
    from hora.launch.plan import threads_per_rank
    from hora.train.files import write_result

    require_writable("--json", json_file)
    # A rank alone has no more threads than one of two, so that the runs differ in nothing but the number of ranks.
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(host.count_cores(), max(RANKS))))
    base = run_dir or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    directories = {nproc: base / f"{nproc}-rank{'s' if nproc > 1 else ''}" for nproc in RANKS}
    for nproc, directory in directories.items():
        click.echo(f"\n{nproc} rank{'s' if nproc > 1 else ''}: hora train lm --config demo --nproc {nproc} --run-dir {directory}\n")
        if code := start_ranks(LmRequest(config="demo", overrides=overrides, nproc=nproc, run_dir=directory), quiet=True):
            return code
    points = compare(*(read_curve(directory / "metrics.jsonl") for directory in directories.values()))
    Console().print(table(points))
    if json_file is not None:
        write_result(json_file, (json.dumps([vars(point) for point in points], indent=1) + "\n").encode())
    return conclude(points, directories)


@dataclass(frozen=True)
class Point:
    """A perplexity as the two runs measured it."""

    step: int
    split: str
    first: float
    second: float

    @property
    def agrees(self) -> bool:
        """Whether the two are equal to 4 significant digits: no further apart than half a unit of the fourth."""
        larger = max(self.first, self.second)
        return math.isfinite(larger) and abs(self.first - self.second) <= 0.5 * 10.0 ** (math.floor(math.log10(larger)) - 3)


def read_curve(path: Path) -> dict[tuple[int, str], float]:
    """The perplexities of a run by step and split."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(row["step"], row["split"]): float("nan") if row["perplexity"] is None else row["perplexity"] for row in rows}


def compare(first: dict[tuple[int, str], float], second: dict[tuple[int, str], float]) -> list[Point]:
    """The two curves side by side.

    Raises:
        HoraError: they do not have the same points.
    """
    if first.keys() != second.keys() or not first:
        raise HoraError(
            f"the two runs must have measured the same things, but only one has {sorted(first.keys() ^ second.keys()) or 'none'}"
        )
    return [Point(step, split, first[step, split], second[step, split]) for step, split in first]


def table(points: list[Point]) -> Table:
    """The curves, with what differs in red."""
    shown = Table("step", "perplexity of", *(f"{nproc} rank{'s' if nproc > 1 else ''}" for nproc in RANKS), "apart by")
    for column in (shown.columns[0], *shown.columns[2:]):
        column.justify = "right"
    for point in points:
        apart = abs(point.first - point.second) / point.second
        style = "" if point.agrees else "red"
        shown.add_row(str(point.step), point.split, f"{point.first:.4f}", f"{point.second:.4f}", f"{apart:.1e}", style=style)
    return shown


def conclude(points: list[Point], directories: dict[int, Path]) -> int:
    """Says what was seen and what to do next; returns the exit code."""
    differing = sum(not point.agrees for point in points)
    two_ranks = directories[RANKS[0]]
    if differing:
        click.echo(
            f"{differing} of {len(points)} perplexities differ within 4 significant digits; the runs are in {two_ranks.parent}", err=True
        )
        return 1
    click.echo(
        f"All {len(points)} perplexities agree to 4 significant digits: the model does not depend on the number of ranks.\n\n"
        f"The runs are in {two_ranks.parent}: configuration, metrics.jsonl, curve.png, logs, checkpoints.\nTry next:\n"
        f"  hora train lm --resume --run-dir {two_ranks} --set epochs=5 --nproc 1     go on, with another number of ranks\n"
        f"  hora train lm --config small --data wikitext-2 --nproc 2                 the whole of WikiText-2\n"
        f"  hora train lm --help"
    )
    return 0
