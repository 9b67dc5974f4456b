"""`hora scale`: how much faster does a script become with more ranks, what limits it, and what would still more ranks bring?"""

import time
from pathlib import Path

import click

_HELP = """Runs TARGET with each number of ranks, in turns, and shows how much faster it gets, what limits it, and what more ranks would bring.

The script must train with hora.DistributedOptimizer or hora.TrainStep and end by itself after a few dozen steps. In its arguments {ranks}
stands for the number of ranks, {64/ranks} and {64*ranks} for a quotient and a product: with --strong the global batch must stay the same, with
--weak the batch of a rank.

\b
  hora scale --ranks 1,2,4 train.py --global-batch-size 64
  hora scale --weak --ranks 1,2,4 --to 1024 train.py --global-batch-size {64*ranks}

With --strong the script is first run with `hora prove`, for a few steps, to see that all numbers of ranks train the same model; the exit code is
1 if they do not.
"""


@click.command(
    "scale",
    help=_HELP,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
)
@click.option("--ranks", default="1,2", show_default=True, metavar="N,N,...", help="Numbers of ranks.")
@click.option(
    "--strong/--weak", "strong", default=True, show_default=True, help="Whether the global batch stays the same, or that of a rank."
)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, metavar="N", help="Runs with each number of ranks.")
@click.option("--to", type=click.IntRange(min=2), metavar="N", help="Predict steps on up to N ranks.")
@click.option(
    "--timings", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE",
    help="Rows of `hora bench allreduce --json` for the prediction. [measured at the end]",
)  # fmt: skip
@click.option(
    "--check/--no-check", default=True, show_default=True, help="With --strong: check first that all numbers of ranks train the same model."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the rows.")
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Draw speed-up and efficiency.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write everything as one page that needs no network.",
)
@click.option("--dir", "directory", type=click.Path(path_type=Path), metavar="DIR", help="Directory of all runs. [runs/scale-TIME]")
@click.option("--timeout", "timeout_s", type=float, default=600.0, show_default=True, metavar="SECONDS", help="Time for each run.")
@click.option("-m", "--module", is_flag=True, help="TARGET is a module, as for `python -m`.")
@click.argument("target")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    ranks: str,
    strong: bool,
    repeats: int,
    to: int | None,
    timings: Path | None,
    check: bool,
    json_file: Path | None,
    png: Path | None,
    html: Path | None,
    directory: Path | None,
    timeout_s: float,
    module: bool,
    target: str,
    args: tuple[str, ...],
) -> int:
    """Makes the runs, prints what they show, and returns the exit code."""
    from hora.diag.output import check_files
    from hora.diag.prove.request import parse_ranks
    from hora.diag.scale.request import Request
    from hora.launch.started import end_when_asked
    from hora.launch.target import rank_command

    request = Request(
        words=(target, *args),
        ranks=tuple(sorted(parse_ranks(ranks))),
        kind="strong" if strong else "weak",
        repeats=repeats,
        to=to,
        module=module,
        directory=directory or Path("runs") / f"scale-{time.strftime('%Y%m%d-%H%M%S')}",
        timeout_s=timeout_s,
    )
    check_files(png, json_file, html)
    rank_command(target, (), "module" if module else "script")
    # A run in progress is ended with this process.
    end_when_asked()
    from hora.diag.scale.course import scale

    return scale(request, timings=timings, check=check, json_file=json_file, png=png, html=html)
