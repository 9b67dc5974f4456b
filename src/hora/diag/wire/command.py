"""`hora bench allreduce`: all-reduce by size, backend, algorithm and number of ranks, beside what a copy of as many bytes takes."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hora.diag.output import check_files, write_what_was_asked
from hora.diag.ranks import start_ranks
from hora.diag.wire.request import ALGORITHMS, DEVICES, HIERARCHICAL, SYMMETRIC, Asked, Place, Request, resolve, say_size
from hora.diag.wire.rows import rows_of, with_origin
from hora.launch.started import end_when_asked
from hora.topology import Topology

_HELP = f"""Measures all-reduce: every size under each backend and algorithm, in turns, each result checked, beside a copy of as many bytes.

\b
  hora bench allreduce
  hora bench allreduce --ranks 2,4 --sizes 1K,64K,4M --backends shm,gloo --algorithms native,ring
  hora bench allreduce --from 1K --to 256M --png allreduce.png --json allreduce.json
  hora bench allreduce --save
  hora run --nnodes 2 --node-rank 0 --master-addr node0 -np 4 -m hora bench allreduce      (and --node-rank 1 on the other node)

The ranks are started once; smaller numbers of ranks are groups of the first ones. Backends: {", ".join(DEVICES)}. Algorithms:
{", ".join(ALGORITHMS)} ({HIERARCHICAL} on several nodes, {SYMMETRIC} on GPUs). --save makes them the choice of all_reduce(algorithm="auto").
"""

_WIDTH = 130
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("allreduce", help=_HELP)
@click.option("--sizes", metavar="SIZE,...", help="Sizes such as 1K,64K,4M.")
@click.option("--from", "begin", metavar="SIZE", help="Smallest size; the others are 4 times the one before. [1K]")
@click.option("--to", "end", metavar="SIZE", help="Largest size. [64M on CPUs, 1G on GPUs]")
@click.option("--backends", metavar="NAME,...", help="[nccl if there are GPUs, else shm,gloo]")
@click.option("--algorithms", metavar="NAME,...", help="The first is what the others are compared with. [all that fit]")
@click.option("--ranks", metavar="N,...", help="Numbers of ranks. [2 on CPUs, all GPUs]")
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True, help="Samples of each variant.")
@click.option("--graphs", is_flag=True, help="On GPUs: measure calls captured in a CUDA graph too.")
@click.option("--png", type=_FILE, metavar="FILE", help="Draw bus bandwidth over size.")
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write the rows, with all samples.")
@click.option("--save", is_flag=True, help='Have all_reduce(algorithm="auto") choose by what is measured.')
def command(png: Path | None, json_file: Path | None, save: bool, **words: Any) -> None:
    """Measures, shows, and writes what was asked for."""
    from hora.launch.host import count_gpus

    check_files(png, json_file)
    here = Topology.from_env()
    alone = here.source == "alone"
    request = resolve(Asked(**words), Place(count_gpus()) if alone else Place(count_gpus(), here.num_nodes, here.world_size))
    if here.rank == 0:
        _announce(request)
    points = _start(request) if alone else _measure_as_rank(request)
    if here.rank == 0:
        _report([row for point in points for row in rows_of(point)], png, json_file, save=save)


def _announce(request: Request) -> None:
    ranks = " and ".join(map(str, request.ranks))
    sizes = f"{say_size(request.sizes[0])} to {say_size(request.sizes[-1])}" if len(request.sizes) > 1 else say_size(request.sizes[0])
    click.echo(f"all-reduce of float32, {sizes}, on {ranks} ranks, {request.rounds} rounds in turns; every sum is checked")
    if "nccl" in request.backends and os.environ.get("NCCL_NVLS_ENABLE") == "0":
        click.echo("NCCL_NVLS_ENABLE=0: NVLink multicast off")


def _start(request: Request) -> list[dict[str, Any]]:
    """The points, measured by ranks that are started and ended here."""
    # The ranks are ended with this process.
    end_when_asked()
    points: list[dict[str, Any]] = []

    def tell(point: dict[str, Any]) -> None:
        points.append(point)
        if sys.stderr.isatty():
            measured = f"{say_size(point['size'])} on {point['ranks']} ranks"
            click.echo(f"\r{len(points)} of {len(request.points)} measured: {measured:24}", nl=len(points) == len(request.points), err=True)

    start_ranks("hora.diag.wire", request.dump(), max(request.ranks), tell)
    return points


def _measure_as_rank(request: Request) -> list[dict[str, Any]]:
    """The points, measured with the ranks of the job that this process is in."""
    import hora
    from hora.diag.wire.measure import measure

    points: list[dict[str, Any]] = []
    here = hora.init(device=None if request.on_gpus else "cpu")
    measure(request, here, lambda point: points.append(asdict(point)))
    hora.shutdown()
    return points


def _report(rows: list[dict[str, Any]], png: Path | None, json_file: Path | None, *, save: bool) -> None:
    from rich.console import Console

    from hora.diag.wire.choices import save as save_choices
    from hora.diag.wire.figures import save_figures
    from hora.diag.wire.picture import draw
    from hora.diag.wire.table import notes, table

    # Lines that a narrow window breaks say more than cells cut short.
    Console(width=max(Console().width, _WIDTH)).print(table(rows))
    for note in notes(rows):
        click.echo(note)
    write_what_was_asked(with_origin(rows, ["hora", *sys.argv[1:]]), png, json_file, draw)
    if save:
        click.echo(f'choices of algorithm "auto" in {save_choices(rows)}')
        click.echo(f"times for hora.report() in {save_figures(rows)}")
