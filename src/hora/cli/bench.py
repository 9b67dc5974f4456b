"""`hora bench NAME`: measures, prints a table, and writes rows on request.

Benches of the registry (`hora.diag.bench`) share one command; one with options of its own brings its command, named in `_OWN`.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from hora.diag.bench import registry
from hora.diag.bench.registry import Measurement, workloads_of
from hora.diag.bench.rows import rows, write_rows
from hora.errors import ConfigError
from hora.launch.report_words import require_writable
from hora.launch.started import end_when_asked

_HELP = """Measures the variants of each workload in turns, and prints a table.

\b
  hora bench launch --rounds 15 --json launch.json
  hora bench data
  hora bench allreduce --ranks 2,4
"""

_SETTINGS = {"help_option_names": ["-h", "--help"]}
_OWN = {"allreduce": "hora.diag.wire.command", "step": "hora.diag.steps.command"}
_SUMMARIES = {
    "allreduce": "All-reduce: sizes, backends, algorithms, ranks.",
    "data": "Shuffling and loading, beside torch's.",
    "launch": "Starting ranks, beside torchrun.",
    "step": "A training step, beside DistributedDataParallel.",
}


class Benches(click.Group):
    """The benches by name, imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """The names."""
        return sorted([*registry.available(), *_OWN])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command of a bench."""
        if cmd_name in _OWN:
            command = importlib.import_module(_OWN[cmd_name]).command
            assert isinstance(command, click.Command)
            return command
        return _registered(cmd_name) if cmd_name in registry.available() else None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command; an unknown one is refused with the known ones."""
        if args[0] not in self.list_commands(ctx) and not args[0].startswith("-"):
            raise ConfigError(f"unknown bench {args[0]!r}; choose one of: {', '.join(self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the benches without importing them."""
        with formatter.section("Benches"):
            formatter.write_dl([(name, _SUMMARIES.get(name, "")) for name in self.list_commands(ctx)])


@click.group("bench", cls=Benches, help=_HELP, context_settings=_SETTINGS)
def command() -> None:
    """The group itself does nothing."""


def _registered(name: str) -> click.Command:
    """The command of a bench of the registry."""

    @click.command(name, help=f"{_SUMMARIES.get(name, '')} Measures the variants of each workload in turns.")
    @click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True, help="Samples of each variant.")
    @click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the rows, with all samples.")
    def bench(rounds: int, json_file: Path | None) -> None:
        _measure(name, rounds, json_file)

    return bench


def _measure(name: str, rounds: int, json_file: Path | None) -> None:
    """Measures the bench `name`."""
    require_writable("--json", json_file)
    end_when_asked()
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
