"""`hora bench step`: a training step under Hora and under DistributedDataParallel, in turns. Loads no torch."""

import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from hora.diag.bench.rows import commit, machine, versions
from hora.diag.output import check_files, write_what_was_asked
from hora.diag.ranks import start_ranks
from hora.diag.steps.request import VARIANTS, WORKLOADS, Request, is_alone, is_captured, resolve
from hora.errors import HoraError
from hora.launch.started import end_when_asked

_LISTS = "\n".join(
    [
        "\b\nWorkloads:",
        *(f"  {name:16} {text}" for name, text in WORKLOADS.items()),
        "\n\b\nVariants:",
        *(f"  {name:26} {text}" for name, text in VARIANTS.items()),
    ]
)
_HELP = f"""Measures a training step: every variant of every workload, in turns in one run. The batch of a rank has the same size for any number
of ranks. At the end the updates are compared with those of one process, so that no variant wins by leaving work out.

\b
  hora bench step
  hora bench step --workloads lstm_small,gpt2_1 --variants ddp-best,overlap,train-step,single-captured --ranks 2 --json step.json
  hora bench step --workloads transformer_nmt --variants single,ddp-best,overlap,sharded,fsdp2 --png step.png

{_LISTS}
"""

_WIDTH: Final = 140
_FILE: Final = click.Path(path_type=Path, dir_okay=False)


@click.command("step", help=_HELP)
@click.option("--workloads", metavar="NAME,...", help="[lstm_small,mlp on CPUs, all on GPUs]")
@click.option("--variants", metavar="NAME,...", help="The first is what the others are compared with. [all that work here]")
@click.option("--ranks", type=click.IntRange(min=1), help="[2 on CPUs, all GPUs]")
@click.option("--backend", type=click.Choice(["shm", "gloo"]), help="On CPUs: what the ranks of all variants sum with.  [shm]")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Samples of each variant.")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Steps of a sample.")
@click.option("--tiny", is_flag=True, help="Tiny models and batches, to try it out.")
@click.option("--png", type=_FILE, metavar="FILE", help="Draw milliseconds a step and efficiency.")
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write the rows, with all samples.")
def command(png: Path | None, json_file: Path | None, **words: Any) -> None:
    """Measures, shows, and writes what was asked for."""
    from hora.launch.host import count_gpus

    check_files(png, json_file)
    request = resolve(**words, num_gpus=count_gpus())
    click.echo(
        f"a step of {', '.join(request.workloads)} on {request.ranks} ranks, {request.rounds} rounds of {request.steps} steps in turns"
    )
    end_when_asked()
    rows: list[dict[str, Any]] = []
    start_ranks("hora.diag.steps", request.dump(), request.ranks, lambda point: rows.extend(rows_of(point, request)))
    _report(rows, png, json_file)


def _report(rows: Sequence[Mapping[str, Any]], png: Path | None, json_file: Path | None) -> None:
    from rich.console import Console

    from hora.diag.steps.picture import draw

    # Lines that a narrow window breaks say more than cells cut short.
    Console(width=max(Console().width, _WIDTH)).print(_table(rows))
    for row in rows:
        if row["eager_because"] is not None:
            click.echo(f"{row['workload']} {row['variant']} ran eagerly: {row['eager_because']}")
    click.echo(
        "efficiency: the fastest step of one process over the variant's; captured: in a CUDA graph; off by: relative error of the updates"
    )
    require_right(rows)
    write_what_was_asked(with_origin(rows, ["hora", *sys.argv[1:]]), png, json_file, draw)


def require_right(rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuses rows of variants that do not do the work.

    Raises:
        HoraError: names them.
    """
    wrong = [row for row in rows if not row["difference"] <= row["tolerance"]]
    if wrong:
        named = ", ".join(
            f"{row['variant']} of {row['workload']} ({row['difference']:.2g}, allowed are {row['tolerance']})" for row in wrong
        )
        raise HoraError(f"updates must be those of the gradients of all ranks, but these are off, and nothing is written: {named}")


def rows_of(point: Mapping[str, Any], request: Request) -> list[dict[str, Any]]:
    """A row for each variant of a workload, in the order asked for."""
    medians = {variant: statistics.median(samples) for variant, samples in point["samples"].items()}
    floor = min((ms for variant, ms in medians.items() if is_alone(variant)), default=None)
    return [
        {
            "workload": point["workload"],
            "variant": variant,
            "ranks": request.ranks,
            "ms": ms,
            "spread": (max(point["samples"][variant]) - min(point["samples"][variant])) / ms,
            "peak_mb": point["peak_mb"][variant],
            "efficiency": None if floor is None else floor / ms,
            "captured": is_captured(variant) and variant not in point["eager_because"],
            "eager_because": point["eager_because"].get(variant),
            "bucket_mib": point["bucket_mib"][variant],
            "items": point["items"],
            "items_per_s": point["num_items"] * (1 if is_alone(variant) else request.ranks) / ms * 1e3,
            "difference": point["differences"][variant],
            "tolerance": point["tolerance"],
            "samples": point["samples"][variant],
        }
        for variant, ms in medians.items()
    ]


def with_origin(rows: Sequence[Mapping[str, Any]], words: Sequence[str]) -> list[dict[str, Any]]:
    """The rows with all that is needed to measure them again, as those of the other benches."""
    origin = {"machine": machine(), "versions": versions(), "command": shlex.join(words), "commit": commit()}
    return [{"what": f"step.{row['workload']}/{row['variant']}", "value": row["ms"], "unit": "ms", **row, **origin} for row in rows]


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in (
        "workload",
        "variant",
        "ms a step",
        "min..max",
        "x of first",
        "items a second",
        "efficiency",
        "peak MiB",
        "captured",
        "off by",
    ):
        shown.add_column(column, justify="left" if column in ("workload", "variant", "captured") else "right", no_wrap=True)
    first: dict[str, float] = {}
    for row in rows:
        ratio = row["ms"] / first.setdefault(row["workload"], row["ms"])
        shown.add_row(
            row["workload"],
            row["variant"],
            f"{row['ms']:.3f}",
            f"{min(row['samples']):.3f}..{max(row['samples']):.3f}",
            f"{ratio:.2f}",
            f"{row['items_per_s']:,.0f} {row['items']}",
            "-" if row["efficiency"] is None else f"{100 * row['efficiency']:.0f} %",
            "-" if row["peak_mb"] is None else f"{row['peak_mb']:,.0f}",
            "yes" if row["captured"] else "no",
            f"{row['difference']:.1g}",
        )
    return shown
