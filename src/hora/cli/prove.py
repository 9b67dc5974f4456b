"""`hora prove`: does the number of ranks change the model that a script trains?"""

import os
import time
from pathlib import Path

import click

from hora.diag.prove.request import DEFAULT_RANKS, DEFAULT_STEPS, Request, parse_ranks
from hora.launch.report_words import require_writable
from hora.launch.started import end_when_asked

_HELP = """Runs TARGET once for each number of ranks and compares the runs step by step: samples, gradients, parameters, buffers, optimizer state.

The script stays as it is: it may use Hora, DistributedDataParallel, or sums of its own. In its arguments {ranks} stands for the number of ranks and
{64/ranks} for the quotient, to keep the global batch the same where the script is told the batch of a rank.

\b
  hora prove --ranks 1,2,4 train.py --batch-size {64/ranks}
  hora prove --exact --ranks 1,2,3 train.py
  hora prove --launcher "torchrun --nproc-per-node {ranks}" train.py

Where they differ it says in what step and tensor first, and why. Exit code 0: no number of ranks differs beyond rounding (with --exact: in any bit);
1: one does; 2: it could not be found out.
"""


@click.command(
    "prove",
    help=_HELP,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
)
@click.option("--ranks", default=DEFAULT_RANKS, show_default=True, metavar="N,N,...", help="Numbers of ranks; the first is compared with.")
@click.option("--steps", type=int, default=DEFAULT_STEPS, show_default=True, metavar="N", help="Optimizer steps to compare.")
@click.option("--exact", is_flag=True, help="Switch exact mode on (as `hora run --exact`) and ask for the same bits.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write everything that is printed."
)
@click.option("--dir", "directory", type=click.Path(path_type=Path), metavar="DIR", help="Where all runs are left. [runs/prove-TIME]")
@click.option("--timeout", "timeout_s", type=float, default=600.0, show_default=True, metavar="SECONDS", help="Time for each run.")
@click.option("--launcher", metavar="COMMAND", help="Start the ranks with this in place of Hora's launcher.")
@click.option("-m", "--module", is_flag=True, help="TARGET is a module, as for `python -m`.")
@click.argument("target")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    ranks: str,
    steps: int,
    exact: bool,
    json_file: Path | None,
    directory: Path | None,
    timeout_s: float,
    launcher: str | None,
    module: bool,
    target: str,
    args: tuple[str, ...],
) -> int:
    """Makes the runs, prints what they show, and returns the exit code."""
    request = Request(
        words=(target, *args),
        ranks=parse_ranks(ranks),
        steps=steps,
        exact=exact,
        module=module,
        launcher=launcher,
        directory=directory or Path("runs") / f"prove-{time.strftime('%Y%m%d-%H%M%S')}",
        timeout_s=timeout_s,
    )
    _require_target(request)
    require_writable("--json", json_file)
    return _prove(request, json_file)


def _require_target(request: Request) -> None:
    from hora.launch.target import rank_command

    if request.launcher is None:
        rank_command(request.words[0], (), "module" if request.module else "script")


def _prove(request: Request, json_file: Path | None) -> int:
    from rich.console import Console

    from hora.diag.prove.inquiry import Inquiry
    from hora.diag.prove.run import ProveError, Runner
    from hora.diag.prove.show import as_json, exit_code, show
    from hora.launch import host
    from hora.launch.plan import threads_per_rank
    from hora.train.files import write_result

    # A run in progress is ended with this process.
    end_when_asked()
    # The same number of threads for each number of ranks, so that nothing else differs.
    threads = str(threads_per_rank(host.count_cores(), max(request.ranks)))
    inquiry = Inquiry(
        Runner(request, environ={"OMP_NUM_THREADS": threads, **os.environ}), lambda doing: click.echo(f"{doing} ...", err=True)
    )
    try:
        inquiry.reference()
        answers = [inquiry.answer(ranks) for ranks in request.ranks[1:]]
    except ProveError as error:
        click.echo(f"hora prove: {error}", err=True)
        return 2
    show(Console(), request, answers)
    if json_file is not None:
        write_result(json_file, as_json(request, answers).encode())
    return exit_code(request, answers)
