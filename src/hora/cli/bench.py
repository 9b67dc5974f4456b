"""`hora bench NAME`: measures, prints a table, and writes rows on request."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from hora.diag.bench.registry import Measurement, available, workloads_of
from hora.diag.bench.rows import rows, write_rows

_HELP = """Measures the variants of each workload in turns, and prints a table.

\b
hora bench launch --rounds 15 --json launch.json
"""


@click.command("bench", help=_HELP, short_help="Measure beside the peers.", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", metavar="|".join(available()))
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True, help="Samples of each variant.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the rows, with all samples.")
def command(name: str, rounds: int, json_file: Path | None) -> None:
    """Measures the bench `name`."""
    measurements: list[Measurement] = []
    for workload in workloads_of(name):
        click.echo(f"{workload.name}: {workload.summary} ({workload.ranks} ranks, {rounds} rounds)")
        measured = workload.measure(rounds, _tick)
        click.echo("\r", nl=False, err=True)
        click.echo(table(measured))
        measurements += measured
    if json_file is not None:
        write_rows(json_file, rows(measurements, ["hora", *sys.argv[1:]]))
        click.echo(f"rows in {json_file}")


def _tick(_variant: str, _value: float) -> None:
    if sys.stderr.isatty():
        click.echo(".", nl=False, err=True)


def table(measurements: Sequence[Measurement]) -> str:
    """Median, spread, and the ratio to the first variant."""
    first, unit = measurements[0].median, measurements[0].workload.unit
    width = max(len(measurement.variant) for measurement in measurements)
    lines = [f"  {'':{width}}  {'median':>10} {'min':>10} {'max':>10} {'of first':>9}   [{unit}]"]
    for measurement in measurements:
        low, high = min(measurement.samples), max(measurement.samples)
        ratio = f"{measurement.median / first:8.2f}x"
        lines.append(f"  {measurement.variant:{width}}  {measurement.median:10.4g} {low:10.4g} {high:10.4g} {ratio:>9}")
    return "\n".join(lines)
