"""`horarun`: a line of Horovod's `horovodrun` as it stands; it is `hora run --horovod` in other words."""

import sys
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any

import click

import hora
from hora.launch.command import command as run
from hora.launch.console import run_command
from hora.launch.horovodrun_options import horovodrun_options
from hora.launch.horovodrun_words import read_command

_HELP = """Starts COMMAND on N ranks as `horovodrun` does, with `import horovod.torch` finding hora.hvd.

\b
  horarun -np 4 python train.py
  horarun -np 8 -H host1:4,host2:4 -p 2222 python train.py

It is `hora run --horovod`, which has more options: restarts, deadlines, reports. What Hora cannot do is refused; what it has no need of is
accepted, and said. Options that name a variable set it for the ranks.
"""


def _show_build(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        click.echo("\n".join(say_build()))
        context.exit()


@click.command("horarun", help=_HELP, context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@click.version_option(hora.__version__, "-v", "--version", message="0.28.1 (hora %(version)s)", help="Version of the API, and of Hora.")
@click.option("-cb", "--check-build", is_flag=True, expose_value=False, is_eager=True, callback=_show_build, help="What there is.")
@click.option("-np", "--num-proc", "nproc", type=click.IntRange(min=1), required=True, metavar="N", help="Number of ranks, exactly.")
@click.option("-H", "--hosts", metavar="HOST:N,...", help="Hosts, each with its slots. [this one]")
@click.option(
    "-hostfile", "--hostfile", type=click.Path(path_type=Path), metavar="FILE", help="The same as lines `host slots=4`; # before remarks."
)
@click.option("--output-filename", "output_dir", metavar="DIR", type=click.Path(path_type=Path), help="hora run's --output-dir.")
@click.option("--mpi", is_flag=True, help="The ranks are ranks of MPI too, on one host. Needs hora[mpi].")
@click.option("--verbose", is_flag=True, help="Say what was decided.")
@horovodrun_options(hidden=False)
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
@click.pass_context
def command(context: click.Context, /, words: Sequence[str], nproc: int, **options: Any) -> int:
    """Starts the ranks and returns the exit code of the job."""
    kind, target, args = read_command(words)
    kinds = {"module": kind == "module", "no_python": kind == "program"}
    exit_code: int = context.invoke(run, horovod=True, nproc=str(nproc), target=target, args=args, **kinds, **options)
    return exit_code


def say_build() -> list[str]:
    """What there is, in the form of `horovodrun --check-build`. Loads torch."""
    from hora import hvd

    mpi = util.find_spec("mpi4py") is not None
    parts = {
        "Available Frameworks": {"TensorFlow": False, "PyTorch": True, "MXNet": False},
        "Available Controllers": {"MPI": mpi, "Gloo": hvd.gloo_built()},
        "Available Tensor Operations": {"NCCL": bool(hvd.nccl_built()), "DDL": False, "CCL": False, "MPI": mpi, "Gloo": hvd.gloo_built()},
    }
    lines = [f"Horovod v0.28.1 (hora {hora.__version__}):"]
    for title, entries in parts.items():
        lines += ["", f"{title}:", *(f"    [{'X' if there else ' '}] {name}" for name, there in entries.items())]
    return lines


def main(args: Sequence[str] | None = None) -> int:
    """Runs `horarun` with `args` (default: this process's); returns the exit code."""
    return run_command(command, args, name="horarun")


if __name__ == "__main__":
    sys.exit(main())
