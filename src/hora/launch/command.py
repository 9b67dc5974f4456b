"""The command line of the launcher: `hora run`, and `python -m hora.launch`."""

import os
from collections.abc import Mapping, Sequence
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import click

from hora import env
from hora.errors import ConfigError
from hora.launch.deadlines import Deadlines
from hora.launch.horovodrun_options import apply, horovodrun_options, say_spellings, take
from hora.launch.horovodrun_words import read_command
from hora.launch.hosts import Host
from hora.launch.options import LaunchOptions, TargetKind
from hora.launch.report_words import ReportWords, report_options

_HELP = """Starts TARGET with ARGS on several ranks, and ends them together.

TARGET is a script, or a module (any name that does not end in .py and is no file). Everything after it is passed on untouched.

\b
  hora run -np 4 train.py --lr 0.1
  hora run --nproc-per-node auto -m package.train
  hora run -np 8 -H host1:4,host2:4 train.py      (starts its ranks there over ssh)
  hora run --hostfile hosts --wdir /shared/work -x WANDB_MODE train.py
  hora run --slurm --nnodes 2 -ppn 8 --slurm-option=--time=8:00:00 train.py      (prints a script for sbatch)
  hora run --nnodes 2 --node-rank 0 --master-addr node0 -np 16 train.py      (by hand; --node-rank 1 on the other node)
  hora run --report -np 4 train.py         (where the time of its training steps goes, in scripts that call hora.init())
  hora run --max-restarts 3 -np 4 train.py (start all ranks anew when one fails; see docs/launching.md)
  hora run --min-ranks 2 --max-ranks 8 --host-discovery ./hosts.sh --max-restarts 9 train.py      (on the hosts that come and go)
  hora run --deadline step=60 -np 4 train.py   (end a job that makes no progress so long in a step; see docs/watching.md)
  hora run --horovod -np 4 train.py        (a script for Horovod, as it stands)
  hora run --mpi -np 4 train.py            (ranks of MPI as well: torch's backend "mpi", and mpi4py)

Words of `mpirun` are understood: -np, -H, --hostfile, -x, -bind-to, -map-by slot, -mca btl_tcp_if_include; and with --horovod all of
`horovodrun`, such as --timeline-filename and --cycle-time-ms, which `horarun --help` lists.

Options may be written with dashes or underscores. The exit code is 0, the first failing rank's own (128 + signal), 75 when the ranks
ended early after saving, 124 when the job made no progress any more, 130 after Ctrl-C, 143 after SIGTERM.
"""


def join_hosts(_context: click.Context, _option: click.Parameter, given: Sequence[str]) -> str | None:
    """The hosts of an option that may be given several times, as if it were given once."""
    return ",".join(given) if given else None


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
@click.option("-np", "-n", "--num-proc", "nproc", metavar="N|auto", help="Ranks of the whole job; `auto` as for --nproc-per-node.")
@click.option(
    "--nproc-per-node", "-ppn", "--gpus", metavar="N|auto|cpu|gpu", help="Ranks of each node; `auto` counts GPUs, or else cores. [1]"
)
@click.option(
    "-H",
    "-hosts",
    "--hosts",
    "-host",
    "--host",
    "hosts",
    multiple=True,
    callback=join_hosts,
    metavar="HOST:N,...",
    help="Hosts, each with its ranks, to start over ssh; one may be this.",
)
@click.option(
    "--hostfile",
    "-hostfile",
    "--machinefile",
    "-machinefile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The same as lines `host slots=4`.",
)
@click.option("--rsh", metavar="COMMAND", help="In place of ssh: COMMAND HOST WORDS... runs WORDS on HOST.")
@click.option("--remote-python", metavar="PATH", help="Python of the other hosts. [the path of this one]")
@click.option("--wdir", "-wdir", metavar="DIR", help="Directory that the ranks run in. [this one, on all hosts]")
@click.option("--nnodes", "--nodes", "num_nodes", type=int, default=1, metavar="N", help="Number of nodes; start this command on each.")
@click.option("--node-rank", "--nr", "-nr", type=int, default=0, metavar="N", help="Index of this node, from 0.")
@click.option("--master-addr", default="127.0.0.1", metavar="HOST", help="Address of node 0.")
@click.option("--master-port", type=int, metavar="PORT", help="Port of node 0. [one node: a free one; several: 29500]")
@click.option("-m", "--module", is_flag=True, help="TARGET is a module, as for `python -m`.")
@click.option("--no-python", is_flag=True, help="TARGET is a program that is no Python script.")
@click.option(
    "--key-file", type=click.Path(path_type=Path), metavar="FILE", help="Key that all nodes share. [the user's own, made when first needed]"
)
@click.option("--log-dir", type=click.Path(path_type=Path), metavar="DIR", help="Where the ranks' logs go. [the last 20 jobs are kept]")
@click.option(
    "--output-dir",
    "--output-filename",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Keep the output of rank N in DIR/rank.N/stdout and stderr as well. [not]",
)
@click.option("--grace", "grace_s", type=float, default=30.0, metavar="SECONDS", help="Time to end after SIGTERM or Ctrl-C. [30]")
@click.option(
    "--deadline",
    metavar="SECTION=SECONDS,...|off",
    help="How long ranks may make no progress: start (until the first step has ended), step, checkpoint, evaluation, stopped; =off for none. "
    "[learnt from the run]",
)
@click.option(
    "--max-restarts", type=int, default=0, metavar="N", help="Start all ranks anew, so often, when one fails or a host is lost. [0]"
)
@click.option("--warm-spares", is_flag=True, help="With --max-restarts: keep processes that have loaded torch ready to be the next ranks.")
@click.option("--min-ranks", type=int, metavar="N", help="Go on without hosts that are lost, with so many ranks at least. [all]")
@click.option("--max-ranks", type=int, metavar="N", help="Take in hosts that come back, up to so many ranks; start with --min-ranks.")
@click.option("--host-discovery", metavar="COMMAND", help="Prints the hosts there are, as lines of a host file; asked again and again.")
@click.option(
    "--discovery-interval",
    "discovery_interval_s",
    type=float,
    default=10.0,
    metavar="SECONDS",
    help="How often hosts are looked for, and a lost one asked again. [10]",
)
@click.option("--join-timeout", "join_timeout_s", type=float, default=300.0, metavar="SECONDS", help="Time for all nodes to come. [300]")
@click.option("--exact", is_flag=True, help="Exact mode in scripts that call hora.init(): the same bits on any number of ranks.")
@click.option("--logical-ranks", type=click.IntRange(min=1), metavar="N", help="Exact mode with so many logical ranks. [8]")
@click.option("--mpi", is_flag=True, help="The ranks are ranks of MPI too, and MPI is the backend. Needs hora[mpi].")
@click.option("--horovod", is_flag=True, help="TARGET is a script for Horovod: its `import horovod.torch` finds hora.hvd.")
@click.option("-x", "exports", multiple=True, metavar="NAME[=VALUE]", help="A variable for the ranks, on other hosts too.")
@click.option("--interface", "--iface", metavar="NAME", help="Network interface for the ranks' sockets.")
@click.option("-mca", "--mca", "mca", nargs=2, multiple=True, metavar="NAME VALUE", help="As of mpirun: btl_tcp_if_include is --interface.")
@click.option(
    "--bind",
    "--bind-to",
    "-bind-to",
    "bind_to",
    metavar="none|core|numa",
    help="Bind each rank to its share of its node's cores, or of its nodes of memory. [none]",
)
@click.option("-map-by", "--map-by", metavar="slot", help="As of mpirun; ranks are numbered node by node anyway.")
@click.option(
    "--shared-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory that all nodes see, through which large objects go. [none]",
)
@click.option("--slurm", is_flag=True, help="Start nothing: print the sbatch script of the job.")
@click.option("--submit", is_flag=True, help="With --slurm: give the script to sbatch.")
@click.option("--slurm-option", "slurm_options", multiple=True, metavar="OPTION", help="With --slurm: such as --partition=gpu.")
@horovodrun_options(hidden=True)
@report_options
@click.option("-q", "--quiet", is_flag=True, help="Show the output of the first rank only.")
@click.option("-v", "--verbose", is_flag=True, help="Say what was decided.")
@click.argument("target")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    module: bool, no_python: bool, exact: bool, logical_ranks: int | None, horovod: bool, slurm: bool, submit: bool, **options: Any
) -> int:
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
        kind, options["target"], options["args"] = read_command([options["target"], *options["args"]])
    variables = _horovods(horovod, options)
    if (submit or options["slurm_options"]) and not slurm:
        raise click.UsageError("--submit and --slurm-option go with --slurm; give that too")
    chosen = _understood(**options)
    if words.wanted:
        chosen["exports"] = {**chosen.get("exports", {}), **words.variables()}
    chosen["exports"] = variables | chosen.get("exports", {})
    asked = LaunchOptions(kind=kind, logical_ranks=logical_ranks, **chosen)
    return _give_to_slurm(asked, submit=submit) if slurm else launch(asked)


def _horovods(asked: bool, options: dict[str, Any]) -> dict[str, str]:
    """Has the words of `horovodrun` out of the options and in force; returns what the ranks are told."""
    words = take(options)
    if asked:
        return {env.HOROVOD: "1"} | apply(words, options)
    if words:
        raise click.UsageError(f"{say_spellings(words)}: this is horovodrun's, and goes with --horovod; give that too")
    return {}


def _give_to_slurm(options: LaunchOptions, *, submit: bool) -> int:
    from hora.launch import slurm

    shared_dir = options.shared_dir and options.shared_dir.absolute()
    options = replace(options, slurm_options=slurm.read_options(options.slurm_options), shared_dir=shared_dir)
    try:
        with chdir(options.wdir or "."):  # from where the target is meant
            script = slurm.batch_script(options, os.getcwd(), os.environ)
    except OSError as error:
        raise ConfigError(f"--wdir {options.wdir} must be a directory, but: {error.strerror}; check the name") from error
    # Names are bytes, which the script must have as they are, whatever the locale.
    click.echo(f"submitted as job {slurm.submit(script)}" if submit else os.fsencode(script), nl=submit)
    return 0


def _understood(
    *,
    nproc: str | None,
    nproc_per_node: str | None,
    hosts: str | None,
    hostfile: Path | None,
    exports: Sequence[str],
    interface: str | None,
    mca: Sequence[tuple[str, str]],
    bind_to: str | None,
    map_by: str | None,
    deadline: str | None,
    **options: Any,
) -> dict[str, Any]:
    """The options as LaunchOptions has them, with what was said in the words of others said in ours."""
    options |= _read_numbers(nproc, nproc_per_node)
    if deadline is not None:
        options["deadlines"] = Deadlines.read(deadline)
    options |= _read_hosts(hosts, hostfile, options)
    if interface is None and not (exports or mca or bind_to or map_by):
        return options
    from hora.launch import mpirun_words, ports

    options |= {"bind": mpirun_words.read_placement(bind_to, map_by)}
    interface = interface or mpirun_words.read_mca(mca)
    variables = mpirun_words.read_exports(exports, os.environ)
    if interface is not None:
        ports.require_interface(interface)
        variables = mpirun_words.interface_variables(interface) | variables
    return options | {"exports": variables, "interface": interface}


def _read_numbers(nproc: str | None, nproc_per_node: str | None) -> dict[str, Any]:
    """`-np` is a number, or asks each node to count; then it must not contradict `--nproc-per-node`."""
    if nproc is None or nproc in ("auto", "cpu", "gpu"):
        if None not in (nproc, nproc_per_node) and nproc != nproc_per_node:
            raise click.UsageError(f"-np {nproc} and --nproc-per-node {nproc_per_node} contradict each other; give one of them")
        return {"nproc": None, "nproc_per_node": nproc_per_node or nproc}
    try:
        return {"nproc": int(nproc), "nproc_per_node": nproc_per_node}
    except ValueError:
        raise click.UsageError(f"-np must be a number or `auto`, but is {nproc!r} instead") from None


def _read_hosts(hosts: str | None, hostfile: Path | None, options: Mapping[str, Any]) -> dict[str, Any]:
    found = _read_discovery(hosts, hostfile, options["host_discovery"]) or {
        "hosts": read_named_hosts(hosts, hostfile, {name: options[name] for name in ("rsh", "remote_python")}),
        "host_discovery": (),
    }
    if any(found.values()) and (options["num_nodes"] != 1 or options["node_rank"] != 0):
        raise click.UsageError(
            "-H (or --host-discovery) starts the ranks on all hosts and contradicts --nnodes and --node-rank; leave one of them out"
        )
    return found


def _read_discovery(hosts: str | None, hostfile: Path | None, command: str | None) -> dict[str, Any]:
    if command is None:
        return {}
    if hosts is not None or hostfile is not None:
        raise click.UsageError("--host-discovery says which hosts there are and contradicts -H and --hostfile; give one of them")
    from hora.launch.discovery import read_command

    return {"host_discovery": read_command(command)}


def read_named_hosts(hosts: str | None, hostfile: Path | None, for_hosts: Mapping[str, Any]) -> tuple[Host, ...]:
    """The hosts that -H or --hostfile name, if one of them is given; options `for_hosts` make no sense without.

    Raises:
        ConfigError, UsageError: they cannot be read, or contradict each other.
    """
    if hosts is None and hostfile is None:
        if given := [f"--{name.replace('_', '-')}" for name, value in for_hosts.items() if value is not None]:
            raise click.UsageError(f"{' and '.join(given)} need the hosts; give them with -H or --hostfile")
        return ()
    if hosts is not None and hostfile is not None:
        raise click.UsageError("-H and --hostfile contradict each other; give one of them")
    from hora.launch.hosts import read_hostfile, read_hosts

    return read_hosts(hosts) if hosts is not None else read_hostfile(cast("Path", hostfile))
