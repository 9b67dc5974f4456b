"""The words of Horovod's `horovodrun`: what Hora can do is said in its own words, what it does anyway is accepted, the rest is answered.

`horovodrun -np 4 -H a:2,b:2 -p 2222 --cycle-time-ms 5 python train.py` is `hora run --horovod -np 4 -H a:2,b:2 --rsh 'ssh -p 2222' train.py` with
HOROVOD_CYCLE_TIME=5. Pure; `horovodrun_options` makes the options of commands from `WORDS`, and `horovodrun_config` reads files with the same.
"""

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hora import env
from hora.errors import ConfigError

Kind = Literal["count", "number", "switch", "text", "pair"]


@dataclass(frozen=True)
class Word:
    """One of horovodrun's options.

    Attributes:
        name: by which it is given to `understand`; the first of its flags is made from it where it has no others.
        kind: "count" and "number" from 0, "switch" (--x and --no-x), "text", "pair" of two counts.
        help: for people.
        place: section and key in a configuration file; empty: it is for the command line.
        flags: all its spellings.
        multiple: whether it can be given several times.
    """

    name: str
    kind: Kind
    help: str
    place: str = ""
    flags: tuple[str, ...] = ()
    multiple: bool = False

    @property
    def spellings(self) -> tuple[str, ...]:
        """The flags that turn it on."""
        return self.flags or (f"--{self.name.replace('_', '-')}",)


WORDS = (
    Word("ssh_port", "count", "Port of ssh on the hosts.", flags=("--ssh-port", "-p")),
    Word("ssh_identity_file", "text", "Key with which ssh lets you in.", flags=("--ssh-identity-file", "-i")),
    Word(
        "network_interfaces",
        "text",
        "Network interface for the ranks' sockets; of several the first.",
        flags=("--network-interfaces", "--network-interface"),
        multiple=True,
    ),
    Word("start_timeout", "count", "Seconds for all hosts to come. [HOROVOD_START_TIMEOUT, else 300]"),
    Word("config_file", "text", "YAML file with the sections params, autotune, timeline, stall_check, library_options, logging."),
    Word("gloo", "switch", "Accepted: ranks talk through Gloo about what is done next."),
    Word("fusion_threshold_mb", "number", "HOROVOD_FUSION_THRESHOLD, in MiB. [128]", "params.fusion_threshold_mb"),
    Word("cycle_time_ms", "number", "HOROVOD_CYCLE_TIME. [1]", "params.cycle_time_ms"),
    Word("cache_capacity", "count", "HOROVOD_CACHE_CAPACITY. [1024]", "params.cache_capacity"),
    Word("timeline_filename", "text", "HOROVOD_TIMELINE: a trace of all operations, written by rank 0.", "timeline.filename"),
    Word("timeline_mark_cycles", "switch", "HOROVOD_TIMELINE_MARK_CYCLES.", "timeline.mark_cycles"),
    Word("stall_check", "switch", "Warn of ranks that others wait for, and end them. [on]", "stall_check.enabled"),
    Word("stall_check_warning_time_seconds", "number", "After how long it warns. [60]", "stall_check.warning_time_seconds"),
    Word("stall_check_shutdown_time_seconds", "number", "After how long it ends; 0: never. [1800]", "stall_check.shutdown_time_seconds"),
    Word("log_level", "text", "TRACE, DEBUG, INFO, WARNING, ERROR or FATAL: the least that ranks say. [INFO on rank 0]", "logging.level"),
    Word("gloo_timeout_seconds", "count", "HORA_TIMEOUT_S: to meet, and for a collective. [300]", "library_options.gloo_timeout_seconds"),
    Word("tcp", "switch", "NCCL does without InfiniBand."),
    Word("min_np", "count", "hora run's --min-ranks.", flags=("--min-np", "--min-num-proc")),
    Word("max_np", "count", "hora run's --max-ranks.", flags=("--max-np", "--max-num-proc")),
    Word("host_discovery_script", "text", "hora run's --host-discovery."),
    Word("reset_limit", "count", "hora run's --max-restarts. [with one of the words above: 1000]"),
    Word("slots_per_host", "count", "hora run's --nproc-per-node."),
    Word("elastic_timeout", "count", "hora run's --join-timeout; so is --start-timeout, and the longer of the two is taken. [300]"),
    Word("disable_cache", "switch", "Unneeded."),
    Word("autotune", "switch", "Unneeded, and so are its settings.", "autotune.enabled"),
    Word("autotune_log_file", "text", "Unneeded.", "autotune.log_file"),
    Word("autotune_warmup_samples", "count", "Unneeded.", "autotune.warmup_samples"),
    Word("autotune_steps_per_sample", "count", "Unneeded.", "autotune.steps_per_sample"),
    Word("autotune_bayes_opt_max_samples", "count", "Unneeded.", "autotune.bayes_opt_max_samples"),
    Word("autotune_gaussian_process_noise", "number", "Unneeded.", "autotune.gaussian_process_noise"),
    Word("hierarchical_allreduce", "switch", "Unneeded.", "params.hierarchical_allreduce"),
    Word("hierarchical_allgather", "switch", "Unneeded.", "params.hierarchical_allgather"),
    Word("torus_allreduce", "switch", "Unneeded.", "params.torus_allreduce"),
    Word("num_nccl_streams", "count", "Unneeded.", "library_options.num_nccl_streams"),
    Word("thread_affinity", "count", "Unneeded.", "library_options.thread_affinity"),
    Word("mpi_threads_disable", "switch", "Unneeded.", "library_options.mpi_threads_disable"),
    Word("log_with_timestamp", "switch", "Not there.", "logging.with_timestamp"),
    Word(
        "log_without_timestamp",
        "switch",
        "Accepted: lines of Hora carry no time.",
        flags=("--log-without-timestamp", "--log-hide-timestamp"),
    ),
    Word("prefix_output_with_timestamp", "switch", "Not there.", flags=("--prefix-output-with-timestamp", "-prefix-timestamp")),
    Word("blacklist_cooldown_range", "pair", "Not there."),
    Word("jsrun", "switch", "Not there."),
    Word("mpi_args", "text", "Not there."),
    Word("binding_args", "text", "Not there; hora run's --bind binds ranks."),
)
"""All options of horovodrun, but for those that `hora run` has under the same name."""

LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
"""Of `--log-level`."""
CONTROLLERS = ("gloo", "mpi")
"""What a configuration file may name."""

_RESTARTS = 1000
_LAST_PORT = 65_535
_UNNEEDED = {
    "hora.hvd chooses algorithms by size and place, and has nothing to tune": (
        *(word.name for word in WORDS if word.name.startswith("autotune")),
        "hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce", "num_nccl_streams", "thread_affinity", "mpi_threads_disable",
    ),
    "nothing is remembered from one job to the next": ("disable_cache",),
    "lines of Hora and of the ranks carry no time; pipe the output through `ts` if you want one": (
        "log_with_timestamp", "prefix_output_with_timestamp",
    ),
    "when a host that was lost is asked again is not for the user to say": ("blacklist_cooldown_range",),
}  # fmt: skip
_UNNEEDED_HERE = {
    "all ranks are on this machine": ("ssh_port", "ssh_identity_file", "slots_per_host"),
    "all ranks are on this machine, and when one fails all are started anew": ("min_np", "max_np"),
}
_REFUSED = {
    "jsrun": "ranks are not started through LSF's jsrun; name the hosts with -H",
    "mpi_args": "no mpirun is called; leave it out, or start with the MPI's own: mpirun ... python -m hora.mpi train.py",
    "binding_args": "no mpirun is called; leave it out, or bind ranks with `hora run --horovod --bind core`",
}
# What `hora run` calls it.
_ELASTIC = {"min_np": "min_ranks", "max_np": "max_ranks", "host_discovery_script": "host_discovery"}


@dataclass(frozen=True)
class Understood:
    """What the words come to.

    Attributes:
        variables: for the ranks.
        options: of `hora run`, by the name of the parameter.
        remarks: what to tell the user, a sentence each.
    """

    variables: Mapping[str, str]
    options: Mapping[str, Any]
    remarks: tuple[str, ...]


def understand(given: Mapping[str, Any], environ: Mapping[str, str], *, others: bool) -> Understood:
    """What words come to.

    Args:
        given: by `Word.name`; only those that were given.
        environ: in which HOROVOD_START_TIMEOUT may stand.
        others: whether hosts are named, so that ssh is used.

    Raises:
        ConfigError: what some ask for is not Hora's to give; all are answered.
    """
    problems = [f"{_say(name)}: {why}" for name, why in _REFUSED.items() if given.get(name)]
    if given.get("log_level", "INFO") not in LEVELS:
        problems.append(f"--log-level must be one of {', '.join(LEVELS)}, but is {given['log_level']!r} instead")
    if given.get("start_timeout") is None and not (environ.get("HOROVOD_START_TIMEOUT") or "0").isdigit():
        problems.append(f"HOROVOD_START_TIMEOUT must be a number of seconds, but is {environ['HOROVOD_START_TIMEOUT']!r} instead")
    problems += _beyond(given)
    if problems:
        raise ConfigError("; ".join(problems))
    options = _hosts(given, environ, others=others) | _elastic(given, others=others)
    return Understood(_variables(given), options, tuple(_remarks(given, others=others)))


def _beyond(given: Mapping[str, Any]) -> Iterator[str]:
    """Numbers that cannot be meant."""
    for word in WORDS:
        if word.kind == "number" and not math.isfinite(given.get(word.name) or 0):
            yield f"{word.spellings[0]} must be a finite number, but is {given[word.name]} instead"
    if given.get("gloo_timeout_seconds") == 0:
        yield "--gloo-timeout-seconds must be at least 1, but is 0"
    if (given.get("ssh_port") or 1) > _LAST_PORT:
        yield f"--ssh-port must be at most {_LAST_PORT}, but is {given['ssh_port']}"
    least, most = given.get("min_np"), given.get("max_np")
    if least is not None and most is not None and least > most:
        yield f"--min-np must be at most --max-np, but they are {least} and {most}"


def read_command(words: Iterable[str]) -> tuple[Literal["script", "module", "program"], str, tuple[str, ...]]:
    """What a command that Horovod or MPI would start is to `hora run`: kind, target, and arguments.

    `python train.py` and `python -m package.train`, with `-u` or without, are a script and a module, for this Python.
    """
    first, *rest = words
    if first in ("python", "python3"):
        after = rest[1:] if rest[:1] == ["-u"] else rest
        if len(after) > 1 and after[0] == "-m":
            return "module", after[1], tuple(after[2:])
        if after and not after[0].startswith("-"):
            return "script", after[0], tuple(after[1:])
    return ("script" if first.endswith(".py") else "program"), first, tuple(rest)


def _variables(given: Mapping[str, Any]) -> dict[str, str]:
    """What the ranks are told."""
    asked = {
        "HOROVOD_FUSION_THRESHOLD": _number(given, "fusion_threshold_mb", 2**20),
        "HOROVOD_CYCLE_TIME": _number(given, "cycle_time_ms"),
        "HOROVOD_CACHE_CAPACITY": _number(given, "cache_capacity"),
        "HOROVOD_TIMELINE": given.get("timeline_filename"),
        "HOROVOD_TIMELINE_MARK_CYCLES": _switch(given, "timeline_mark_cycles"),
        "HOROVOD_STALL_CHECK_DISABLE": _switch(given, "stall_check", on="0", off="1"),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": _number(given, "stall_check_warning_time_seconds"),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": _number(given, "stall_check_shutdown_time_seconds"),
        "HOROVOD_LOG_LEVEL": given.get("log_level"),
        env.TIMEOUT_S: _number(given, "gloo_timeout_seconds"),
        "NCCL_IB_DISABLE": "1" if given.get("tcp") else None,
        "HOROVOD_ELASTIC": "1" if any(given.get(name) is not None for name in _ELASTIC) else None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _hosts(given: Mapping[str, Any], environ: Mapping[str, str], *, others: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    port, identity = given.get("ssh_port"), given.get("ssh_identity_file")
    if others and (port is not None or identity is not None):
        words = ["ssh", *([] if port is None else ["-p", str(port)]), *([] if identity is None else ["-i", identity])]
        options["rsh"] = shlex.join(words)
    if interfaces := _interfaces(given):
        options["interface"] = interfaces[0]
    waits = (given.get("start_timeout") or int(environ.get("HOROVOD_START_TIMEOUT") or 0), given.get("elastic_timeout") or 0)
    if any(waits):
        options["join_timeout_s"] = float(max(waits))
    if others and given.get("slots_per_host") is not None:
        options["nproc_per_node"] = str(given["slots_per_host"])
    return options


def _elastic(given: Mapping[str, Any], *, others: bool) -> dict[str, Any]:
    options = {theirs: given[name] for name, theirs in _ELASTIC.items() if given.get(name) is not None}
    limit = given.get("reset_limit", _RESTARTS if options else None)
    restarts = {} if limit is None else {"max_restarts": limit}
    return options | restarts if others else restarts


def _remarks(given: Mapping[str, Any], *, others: bool) -> Iterable[str]:
    unneeded = _UNNEEDED if others else _UNNEEDED | _UNNEEDED_HERE
    for why, names in unneeded.items():
        if asked := [_say(name) for name in names if given.get(name) not in (None, False)]:
            yield f"{', '.join(asked)}: accepted, and without effect; {why}"
    interfaces = _interfaces(given)
    if len(interfaces) > 1:
        yield f"the ranks' sockets use {interfaces[0]}, the first of --network-interfaces"
    if given.get("timeline_mark_cycles") and given.get("timeline_filename") is None:
        yield "--timeline-mark-cycles marks the timeline that the script starts; --timeline-filename would write one from the beginning"


def _interfaces(given: Mapping[str, Any]) -> list[str]:
    return [name for words in given.get("network_interfaces", ()) for name in words.split(",") if name]


def _number(given: Mapping[str, Any], name: str, factor: int = 1) -> str | None:
    return None if given.get(name) is None else f"{given[name] * factor:.15g}"


def _switch(given: Mapping[str, Any], name: str, on: str = "1", off: str = "0") -> str | None:
    return None if given.get(name) is None else on if given[name] else off


def _say(name: str) -> str:
    return next(word.spellings[0] for word in WORDS if word.name == name)
