"""Every environment variable that belongs to Hora, with its meaning.

The launcher writes them, ranks read them; no other module names a `HORA_*` string. The job's key never stands in a variable: a variable
names the file that holds it.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hora.errors import ConfigError

JOB_ID: Final = "HORA_JOB_ID"
"""Random name of the job, the same in all its processes and generations; no secret."""

JOB_DIR: Final = "HORA_JOB_DIR"
"""Private directory of the job on this node (mode 0700), removed when the job ends."""

KEPT_DIR: Final = "HORA_KEPT_DIR"
"""Private directory on the launcher's machine that outlives generations, told to the ranks there, removed when the job ends; empty: none."""

RENDEZVOUS: Final = "HORA_RENDEZVOUS"
"""Where the key-value store of the job listens: `unix:///path` or `tcp://host:port`."""

KEY_FILE: Final = "HORA_KEY_FILE"
"""File (mode 0600) that holds the key with which the job's processes know each other."""

GENERATION: Final = "HORA_GENERATION"
"""How many times the job has been started anew after a failure; 0 at first."""

NODE_RANK: Final = "HORA_NODE_RANK"
"""Index of this node in the job."""

NUM_NODES: Final = "HORA_NUM_NODES"
"""How many nodes the job has."""

LAUNCHER_PID: Final = "HORA_LAUNCHER_PID"
"""Process that a rank must not outlive."""

PORTABLE: Final = "HORA_PORTABLE"
"""`1` switches off what only Linux has (Unix sockets, parent-death signals, /proc), to test the portable ways."""

SPARE: Final = "HORA_SPARE"
"""Descriptor of the socket over which a process that is kept as a spare is told to be a rank; ranks do not see it."""

EXACT: Final = "HORA_EXACT"
"""Number of logical ranks of exact mode, for scripts that do not say themselves whether they want it; absent: off."""

DEFAULT_LOGICAL_RANKS: Final = 8
"""Logical ranks of exact mode, where no number is given."""

MPI: Final = "HORA_MPI"
"""`1` where the ranks are ranks of MPI as well (`hora run --mpi`), which is then the backend where no other is asked for."""

SHARED_DIR: Final = "HORA_SHARED_DIR"
"""Directory that all ranks see, through which large objects go, for scripts that do not name one themselves; absent: over the network."""

FAULT: Final = "HORA_FAULT"
"""Faults to inject, for tests: `rank=1,point=step.3.before,act=SIGKILL`; several are separated by `;`."""

LONGEST_S: Final = 1e9
"""The longest time that can be given, in seconds: thirty years. The system takes none that is much longer."""

TIMEOUT_S: Final = "HORA_TIMEOUT_S"
"""Deadline in seconds for init and for each collective, where the call does not give one."""

STATE_DIR: Final = "HORA_STATE_DIR"
"""Where logs of jobs, the user's key and the user's table of algorithms are kept; by default `~/.local/state/hora`."""

DATA_URL: Final = "HORA_DATA_URL"
"""Where the archives of data sets fetched by name lie, in place of their own hosts: `https://host/folder`."""

SHARE_GPUS: Final = "HORA_SHARE_GPUS"
"""`1` lets ranks of a node share its GPUs where there are fewer: to try a job out, not for speed."""

SHM_KERNEL: Final = "HORA_SHM_KERNEL"
"""`0` makes backend shm do without its C kernel; by default the kernel is built, once a machine, where there is a compiler."""

COPY_ENGINES: Final = "HORA_COPY_ENGINES"
"""`0` leaves the sums of captured steps to NCCL where copy engines of the GPUs would move the gradients."""

REPORT: Final = "HORA_REPORT"
"""`1` (`hora run --report`) has every job of the script print where the time of its steps went, when it ends."""

REPORT_JSON: Final = "HORA_REPORT_JSON"
"""File to which that is written."""

TRACE: Final = "HORA_TRACE"
"""File to which the latest steps of all ranks are written, for Perfetto."""

PROVE: Final = "HORA_PROVE"
"""Directory in which `hora prove` has the script's processes record their steps; absent: nothing is recorded."""

PROVE_STEPS: Final = "HORA_PROVE_STEPS"
"""After how many steps a script under `hora prove` ends."""

PROVE_WITHOUT: Final = "HORA_PROVE_WITHOUT"
"""What `hora prove` takes out of a script to see whether it is the cause: `float64` (rounding), `dropout`, `batch_norm`, with commas between."""

HOROVOD: Final = "HORA_HOROVOD"
"""`1` (`hora run --horovod`) has the script's `import horovod.torch` find `hora.hvd`."""

HVD_ALLOW_PICKLE: Final = "HORA_HVD_ALLOW_PICKLE"
"""`1` lets `hora.hvd` send objects by pickle that it cannot send otherwise: then every rank runs what another one sends."""

HVD_COMMIT_DIR: Final = "HORA_HVD_COMMIT_DIR"
"""Directory in which `hora.hvd.elastic` keeps the newest commit, for the next job too; absent: with the launcher, until the job ends."""


def fleeting_mark(kept_dir: str | os.PathLike[str], generation: int) -> Path:
    """File that ranks leave in `kept_dir` when they end with exit code 75 and what they have saved is there alone: it is gone with the job."""
    return Path(kept_dir) / f"fleeting.g{generation}"


@dataclass(frozen=True)
class JobEnv:
    """What Hora's launcher told this process; each field is None outside it."""

    job_id: str | None
    job_dir: str | None
    rendezvous: str | None
    key_file: str | None
    generation: int
    node_rank: int | None
    num_nodes: int | None

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> "JobEnv":
        """Reads the launcher's variables from `environ`.

        Raises:
            ConfigError: one that is to be a number is none.
        """
        return cls(
            job_id=environ.get(JOB_ID),
            job_dir=environ.get(JOB_DIR),
            rendezvous=environ.get(RENDEZVOUS),
            key_file=environ.get(KEY_FILE),
            generation=whole_number(GENERATION, environ) or 0,
            node_rank=whole_number(NODE_RANK, environ),
            num_nodes=whole_number(NUM_NODES, environ),
        )


def whole_number(name: str, environ: Mapping[str, str] = os.environ) -> int | None:
    """The number in a variable; None where it is not set, or empty.

    Raises:
        ConfigError: it is no number from 0.
    """
    text = environ.get(name, "")
    if not re.fullmatch(r"[0-9]{0,18}", text):
        raise ConfigError(f"{name} must be an integer from 0, but is {text[:80]!r} instead; it is set by launchers, so unset it elsewhere")
    return int(text) if text else None


def portable_only(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether means that only Linux has are switched off."""
    return environ.get(PORTABLE, "") == "1"


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where logs of jobs, the user's key and the user's table of algorithms are kept; need not exist yet.

    Raises:
        ConfigError: it is not named, and this user has no home directory.
    """
    if named := environ.get(STATE_DIR):
        return Path(named)
    try:
        return Path.home() / ".local" / "state" / "hora"
    except RuntimeError as error:
        raise ConfigError(f"this user has no home directory to keep keys and logs in; name a directory in {STATE_DIR}") from error
