"""The command line of the launcher: `hora run`, and `python -m hora.launch`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hora import env
from hora.launch.plan import LaunchOptions, TargetKind
from hora.launch.report_words import ReportWords, report_options

_HELP = """Starts TARGET with ARGS on several ranks, and ends them together.

TARGET is a script, or a module (any name that does not end in .py and is no file). Everything after it is passed on untouched.

\b
  hora run -np 4 train.py --lr 0.1
  hora run --nproc-per-node auto -m package.train
  hora run --nnodes 2 --node-rank 0 --master-addr node0 -np 16 train.py      (and --node-rank 1 on the other node)
  hora run --report -np 4 train.py         (where the time of its training steps goes, in scripts that call hora.init())
  hora run --mpi -np 4 train.py            (ranks of MPI as well: torch's backend "mpi", and mpi4py)

Words of `mpirun` are understood: -np, -H, -x, -bind-to none, -map-by slot, -mca btl_tcp_if_include.

Options may be written with dashes or underscores. The exit code is 0, the first failing rank's own (128 + signal), 75 when the ranks
ended early after saving, 130 after Ctrl-C, 143 after SIGTERM.
"""


@click.command(
    "run",
    help=_HELP,
    short_help="Start a script on several ranks.",
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
    },
)
@click.option("-np", "-n", "nproc", type=int, metavar="N", help="Ranks of the whole job.")
@click.option(
    "--nproc-per-node", "-ppn", default="1", metavar="N|auto|cpu|gpu", help="Ranks of each node; `auto` counts GPUs, or else cores."
)
@click.option("--nnodes", "num_nodes", type=int, default=1, metavar="N", help="Number of nodes; start this command on each.")
@click.option("--node-rank", type=int, default=0, metavar="N", help="Index of this node, from 0.")
@click.option("--master-addr", default="127.0.0.1", metavar="HOST", help="Address of node 0.")
@click.option("--master-port", type=int, metavar="PORT", help="Port of node 0. [one node: a free one; several: 29500]")
@click.option("-m", "--module", is_flag=True, help="TARGET is a module, as for `python -m`.")
@click.option("--no-python", is_flag=True, help="TARGET is a program that is no Python script.")
@click.option(
    "--key-file", type=click.Path(path_type=Path), metavar="FILE", help="Key that all nodes share. [the user's own, made when first needed]"
)
@click.option("--log-dir", type=click.Path(path_type=Path), metavar="DIR", help="Where the ranks' logs go. [the last 20 jobs are kept]")
@click.option("--grace", "grace_s", type=float, default=30.0, metavar="SECONDS", help="Time to end after SIGTERM or Ctrl-C. [30]")
@click.option("--join-timeout", "join_timeout_s", type=float, default=300.0, metavar="SECONDS", help="Time for all nodes to come. [300]")
@click.option("--exact", is_flag=True, help="Exact mode in scripts that call hora.init(): the same bits on any number of ranks.")
@click.option("--logical-ranks", type=click.IntRange(min=1), metavar="N", help="Exact mode with so many logical ranks. [8]")
@click.option("--mpi", is_flag=True, help="The ranks are ranks of MPI too, and MPI is the backend. Needs hora[mpi].")
@click.option(
    "-H",
    "-hosts",
    "-host",
    "--host",
    "hosts",
    metavar="HOST:N,...",
    help="As of mpirun: hosts, each with its ranks; start this command on each.",
)
@click.option(
    "-x", "exports", multiple=True, metavar="NAME[=VALUE]", help="As of mpirun: a variable for the ranks, which have all of yours anyway."
)
@click.option("--interface", metavar="NAME", help="Network interface for the ranks' sockets.")
@click.option("-mca", "--mca", "mca", nargs=2, multiple=True, metavar="NAME VALUE", help="As of mpirun: btl_tcp_if_include is --interface.")
@click.option("-bind-to", "--bind-to", metavar="none", help="As of mpirun; ranks are bound to no cores anyway.")
@click.option("-map-by", "--map-by", metavar="slot", help="As of mpirun; ranks are numbered node by node anyway.")
@click.option(
    "--shared-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory that all nodes see, through which large objects go. [none]",
)
@report_options
@click.option("-q", "--quiet", is_flag=True, help="Show the output of the first rank only.")
@click.option("-v", "--verbose", is_flag=True, help="Say what was decided.")
@click.argument("target")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(module: bool, no_python: bool, exact: bool, logical_ranks: int | None, **options: Any) -> int:
    """Starts the ranks and returns the exit code of the job."""
    if module and no_python:
        raise click.UsageError("--module and --no-python contradict each other; give one of them")
    kind: TargetKind = "module" if module else "program" if no_python else "script"
    from hora.launch.job import launch  # here, so that --help and mistakes are answered at once

    words = ReportWords.take(options)
    if options["node_rank"] == 0:
        words.require_files()
    if exact and logical_ranks is None:
        logical_ranks = env.DEFAULT_LOGICAL_RANKS
    if kind == "script" and options["target"] in ("python", "python3") and options["args"] and not os.path.exists(options["target"]):
        # `mpirun ... python train.py`: which Python is not the question.
        options["target"], *options["args"] = options["args"]
        options["args"] = tuple(options["args"])
    chosen = _of_mpirun(**options)
    if words.wanted:
        chosen["exports"] = {**chosen.get("exports", {}), **words.variables()}
    return launch(LaunchOptions(kind=kind, logical_ranks=logical_ranks, **chosen))


def _of_mpirun(
    *,
    hosts: str | None,
    exports: Sequence[str],
    interface: str | None,
    mca: Sequence[tuple[str, str]],
    bind_to: str | None,
    map_by: str | None,
    **options: Any,
) -> dict[str, Any]:
    """The options, with what was said in the words of mpirun said in ours."""
    if hosts is None and interface is None and not (exports or mca or bind_to or map_by):
        return options
    from hora.launch import mpirun_words, ports

    mpirun_words.check_placement(bind_to, map_by)
    named = mpirun_words.read_mca(mca)
    interface = interface or named
    variables = mpirun_words.read_exports(exports, os.environ)
    if interface is not None:
        ports.require_interface(interface)
        variables = mpirun_words.interface_variables(interface) | variables
    if hosts is None:
        return options | {"exports": variables}
    if options["num_nodes"] != 1:
        raise click.UsageError("-H and --nnodes contradict each other; give one of them")
    found = mpirun_words.read_hosts(hosts, ports.is_this_machine, options["nproc"])
    if found.num_nodes > 1:
        click.echo(f"hora: this is node {found.node_rank} of {found.num_nodes}; run the same command on each host", err=True)
        options |= {"num_nodes": found.num_nodes, "node_rank": found.node_rank, "master_addr": found.master_addr}
    if options["nproc"] is not None and options["nproc"] > found.nproc:
        raise click.UsageError(f"-np {options['nproc']} is more than the {found.nproc} slots of -H {hosts}")
    return options | {"exports": variables, "nproc": options["nproc"] or found.nproc}
