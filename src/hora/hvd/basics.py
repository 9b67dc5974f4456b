"""Joining and leaving, and what a process can ask about its place: Horovod's words over Hora's session."""

import atexit
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import hora
from hora.comm.session import Session
from hora.errors import ConfigError, HoraError
from hora.hvd import state
from hora.hvd.engine.engine import Engine
from hora.hvd.exceptions import InitializationFailed, brief
from hora.hvd.process_sets import ProcessSet, global_process_set, register
from hora.hvd.settings import is_on, log_level_from, timeline_from, tuning_from
from hora.hvd.state import State
from hora.log import get_logger

_registered_at_exit = False


@brief
def init(comm: Any = None, process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None) -> None:
    """Joins the job that the launcher has told of (`hora run`, torchrun, mpirun, Slurm), and starts the engine; again does nothing.

    A session that `hora.init` has made is used, and left in place by `shutdown`.

    Collective: all ranks call it, with the same process sets.

    Args:
        comm: None or an empty list; or all ranks as a list, or a communicator of mpi4py that has all: there is no world of some of the ranks.
        process_sets: sets to make known, or "dynamic": they may come and go later.

    Raises:
        ValueError: `comm` has not all ranks, or a process set comes twice; or the ranks could not meet ("Horovod initialization failed").
    """
    if state.is_running():
        return
    sets = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ConfigError(f"process_sets must be a list of ProcessSet or 'dynamic', but is {process_sets!r} instead")
    _require_distinct(sets)
    owns = not hora.is_initialized()
    try:
        session = hora.init()
    except HoraError as error:
        kind = ConfigError if isinstance(error, ConfigError) else InitializationFailed
        raise kind(f"Horovod initialization failed: {error}") from error
    try:
        _begin(session, comm, owns, process_sets == "dynamic" or is_on("HOROVOD_DYNAMIC_PROCESS_SETS"), sets)
    except BaseException:
        shutdown()
        if owns:
            hora.shutdown()
        raise


def _begin(session: Session, comm: Any, owns: bool, dynamic: bool, sets: Sequence[ProcessSet]) -> None:
    global _registered_at_exit
    _require_all(comm, session.world_size)
    if (level := log_level_from()) is not None:
        get_logger().setLevel(level)
    begun = State(session, Engine(session, tuning_from()), owns, dynamic)
    begun.engine.register(0, begun.group_of(tuple(range(session.world_size))))
    begun.sets[0] = global_process_set
    state.begin(begun)
    session.release.callback(_forget, begun)  # a session that ends takes the engine with it
    begun.engine.start()
    if not _registered_at_exit:
        _registered_at_exit = True
        atexit.register(_shutdown_at_exit)
    path = timeline_from()
    if path is not None:
        start_timeline(path, is_on("HOROVOD_TIMELINE_MARK_CYCLES"))
    for process_set in sets:
        register(process_set)


def shutdown() -> None:
    """Leaves, which ends the operations of all ranks; does nothing where nothing is in force. `init` can be called again afterwards."""
    _shutdown(sys.exc_info()[1], "called hvd.shutdown()")


def _shutdown_at_exit() -> None:
    _shutdown(getattr(sys, "last_value", None), "has come to the end of its script")


def _shutdown(error: BaseException | None, what: str) -> None:
    ended = state.end()
    if ended is None:
        return
    _stop(ended, error, what)
    if ended.owns_session and hora.is_initialized():
        hora.shutdown()


def _forget(ended: State) -> None:
    """The session ends; so does what it carried."""
    if state.is_running() and state.current() is ended:
        state.end()
    _stop(ended, None, "called hora.shutdown()")


def _stop(ended: State, error: BaseException | None, what: str) -> None:
    rank = ended.session.rank
    if error is None or isinstance(error, SystemExit):
        why = (
            f"Rank {rank} {what}. This was caused by an attempt to allreduce, allgather or broadcast a tensor after one of the ranks finished "
            "execution."
        )
    else:
        why = f"This was caused by an exception on rank {rank}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    ended.engine.stop(why)
    ended.handles.clear()
    for process_set in list(ended.sets.values())[1:]:
        process_set.process_set_id = None


def is_initialized() -> bool:
    """Whether `init` is in force."""
    return state.is_running()


def size() -> int:
    """Number of ranks."""
    return state.current().session.world_size


def rank() -> int:
    """Index of this rank."""
    return state.current().session.rank


def local_size() -> int:
    """Number of ranks of this node."""
    return state.current().session.topology.local_world_size


def local_rank() -> int:
    """Index of this rank on its node."""
    return state.current().session.topology.local_rank


def cross_size() -> int:
    """Number of nodes that have a rank of this local rank."""
    return len(_counterparts())


def cross_rank() -> int:
    """Index of this node among those that have a rank of this local rank."""
    return _counterparts().index(state.current().session.topology.node_rank)


def _counterparts() -> list[int]:
    session = state.current().session
    return sorted(record.node_rank for record in session.records if record.local_rank == session.topology.local_rank)


def is_homogeneous() -> bool:
    """Whether every node has equally many ranks."""
    nodes = [record.node_rank for record in state.current().session.records]
    return len({nodes.count(node) for node in nodes}) == 1


@brief
def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begins to write the timeline to `file_path`, on rank 0.

    Raises:
        ValueError: `init` is not in force, or the file cannot be written.
    """
    here = state.current()
    if here.session.rank == 0:
        try:
            here.engine.timeline.start(Path(file_path), mark_cycles)
        except OSError as error:
            raise ConfigError(f"the timeline cannot be written: {error}") from error


def stop_timeline() -> None:
    """Ends the timeline."""
    state.current().engine.timeline.close()


def check_extension(*_: Any, **__: Any) -> None:
    """Raises nothing, whatever it is asked about: there is nothing to compile, and so nothing that could be missing."""


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001 (Horovod's)
    """Whether there is `horovod.torch`, or whichever front end is asked for."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the front end `ext_base_name` has GPUs."""
    return extension_available(ext_base_name, verbose) and torch.cuda.is_available()


def mpi_threads_supported() -> bool:
    """Whether MPI is the backend, and lets several threads call it at once: mpi4py may be used beside."""
    if not mpi_enabled():
        return False
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """Whether MPI is the backend (`--mpi`)."""
    return state.is_running() and state.current().session.backend == "mpi"


def mpi_built() -> bool:
    """Whether mpi4py is there, through which Hora calls MPI."""
    return find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """Whether MPI is not the backend."""
    return not mpi_enabled()


def gloo_built() -> bool:
    """Whether this build of PyTorch has Gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """The version of NCCL, such as 22703, or 0."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built() -> bool:
    """False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: Intel's oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Whether this build of PyTorch has CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this build of PyTorch has ROCm."""
    return torch.version.hip is not None


def _require_distinct(sets: Sequence[ProcessSet]) -> None:
    seen: list[list[int] | None] = []
    for number, process_set in enumerate(sets):
        if process_set.ranks in seen or process_set is global_process_set:
            raise ConfigError(f"process_sets must be distinct, but entry number {number} is a duplicate: {process_set}")
        seen.append(process_set.ranks)


def _require_all(comm: Any, world_size: int) -> None:
    if comm is None or comm == []:
        return
    found = sorted(comm) if isinstance(comm, Sequence) else None
    if found == list(range(world_size)) or (found is None and hasattr(comm, "Get_size") and comm.Get_size() == world_size):
        return
    raise ConfigError(
        f"comm must have all {world_size} ranks, but is {comm!r}: there is no world of some of the ranks; start fewer, or use a ProcessSet"
    )
