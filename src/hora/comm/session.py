"""What `init` makes and `shutdown` ends: this process's membership in a job.

The one module with state of its own: the session in force. Everything else in Hora asks `session()` for it. `init` finds the process's place
(`places`), opens the store where the ranks meet (`meeting`), has all ranks introduce themselves (`handshake`), and then makes
torch.distributed's default group, so that whatever is built on torch.distributed works too.
"""

import atexit
import itertools
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from hora import env, events, log, pulse
from hora.comm.adoption import adopt
from hora.comm.algorithms import algorithm_table
from hora.comm.awaiting import awaiting_others
from hora.comm.backends import Backend
from hora.comm.backends.shm.segment import CannotShare
from hora.comm.deadline import Deadline
from hora.comm.devices import choose_backend_and_device, settle_device
from hora.comm.exactness import Exact, reproducible
from hora.comm.groups import Groups
from hora.comm.handshake import exchange_records
from hora.comm.interfaces import choose_interface, variables_set
from hora.comm.leaving import ending_within, reset_graphs
from hora.comm.meeting import Meeting
from hora.comm.places import Place, find_place
from hora.comm.progress import Progress
from hora.comm.records import Record, Settings, introduce, neighbours_of, number_nodes, place_by_hosts, several_hosts
from hora.comm.roll_call import RollCall
from hora.comm.shared_directory import SharedDirectory, choose_shared_dir, sweep
from hora.comm.torch_private import PrefixStore, Store
from hora.errors import ConfigError, HoraError, PeerLost, RendezvousTimeout
from hora.plan.algorithm_table import Table
from hora.plan.logical import LogicalRanks
from hora.plan.nodes import Nodes
from hora.topology import Topology

DEFAULT_TIMEOUT_S = 300.0

_STEP_FLAGS = 5
"""Numbers that a step tells beside its weights (`sync.control`)."""

_ENDED_BY_CLOSE = ("group", "groups", "store")

_session: "Session | None" = None
_sessions_begun = 0


@dataclass(eq=False)
class Session:
    """Membership of this process in a job, from `init` to `shutdown`.

    Attributes:
        topology: where this rank stands.
        device: where its tensors live.
        backend: name of what moves the bytes.
        store: key-value store that all ranks share, for small control messages.
        group: torch.distributed's default group.
        groups: that group and, made when an algorithm first needs them, those by node.
        generation: how often the job has been started anew after a failure; 0 at first.
        timeout_s: deadline of each collective that does not give its own.
        progress: counts this rank's collectives and explains failures.
        roll_call: has all ranks say what they are about to do.
        check_calls: whether collectives call the roll; a step always does.
        records: what each rank said of itself when it joined, by rank.
        release: closes what `init` opened.
        pid: the process that is the rank; those forked from it are none.
        exact: what fixes the bits of the run; None outside exact mode.
        shared: where ranks may leave large objects for each other.
        turns: numbers of the calls of `rank_zero_first`.
        plans: numbers of the gradient plans made, the same on all ranks.
        synchronizers: the gradient synchroniser of each model, kept by `sync`.
        before_leaving: called by `shutdown`, unless an exception drives this rank out; may use collectives.
    """

    topology: Topology
    device: torch.device
    backend: str
    store: Store
    group: dist.ProcessGroup
    groups: Groups = field(repr=False)
    generation: int
    timeout_s: float
    records: Sequence[Record]
    exact: Exact | None
    check_calls: bool
    progress: Progress = field(repr=False)
    roll_call: RollCall = field(repr=False)
    release: ExitStack = field(repr=False)
    shared: SharedDirectory = field(repr=False)
    pid: int = field(default_factory=os.getpid)
    turns: Iterator[int] = field(default_factory=itertools.count, repr=False)
    plans: Iterator[int] = field(default_factory=itertools.count, repr=False)
    synchronizers: weakref.WeakKeyDictionary[Any, Any] = field(default_factory=weakref.WeakKeyDictionary, repr=False)
    before_leaving: list[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def rank(self) -> int:
        """Index of this process in the job."""
        return self.topology.rank

    @property
    def world_size(self) -> int:
        """Number of processes in the job."""
        return self.topology.world_size

    @property
    def logical_ranks(self) -> LogicalRanks:
        """To whom each global batch is dealt, and who plays them: outside exact mode one a rank."""
        return LogicalRanks(self.exact.logical_ranks if self.exact else self.world_size, self.world_size)

    def close(self) -> None:
        """Leaves the job and closes what `init` opened; again does nothing. The group and the store are gone afterwards."""
        self.synchronizers.clear()
        # Whoever still holds the session must not hold the group: Gloo's threads, alive when the interpreter ends, abort the process.
        for name in _ENDED_BY_CLOSE:
            self.__dict__.pop(name, None)
        with ending_within(self.timeout_s, self.rank):
            self.release.close()

    def __getattr__(self, name: str) -> Any:
        if name in _ENDED_BY_CLOSE:
            raise HoraError(f"the session is closed and has no {name} any more; call hora.init() again")
        raise AttributeError(f"'Session' object has no attribute {name!r}")


def init(
    *,
    backend: str | None = None,
    device: str | torch.device | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout_s: float | None = None,
    exact: bool | Exact | None = None,
    config: Mapping[str, Any] | None = None,
    check_calls: bool | None = None,
    shared_dir: str | os.PathLike[str] | None = None,
) -> Session:
    """Joins the job and makes this process one of its ranks.

    Without arguments everything is found in the environment: the place from Hora's launcher, torchrun, Slurm, Open MPI or MPICH (a process
    that none of them started is a world of one and opens no socket); the device from the local rank; the backend from the device. When
    torch.distributed has been initialised already, that group is used and left in place by `shutdown`.

    Collective: all ranks call it.

    Args:
        backend: "nccl", "shm", "gloo", "mpi" or "solo"; by default nccl on GPUs, shm on the CPUs of one host, gloo on those of several, mpi
            under `hora run --mpi`, solo for a world of one.
        device: where this rank's tensors live; by default the GPU with the number of the local rank when there are GPUs, else the CPU.
        init_method: `env://`, `tcp://host:port` of rank 0, or `file:///path` on a disk that all ranks see.
        rank: index of this process, with an `init_method` only.
        world_size: number of processes, with an `init_method` only.
        timeout_s: deadline in seconds for joining and for each collective; by default HORA_TIMEOUT_S, or 300.
        exact: whether training gives the same bits on any number of ranks up to `Exact.logical_ranks` (True: 8); by default what the launcher
            was told. Kernels are deterministic until `shutdown`.
        config: what else must be the same on all ranks, such as `vars(args)`; nested as one likes, compared as text.
        check_calls: whether all ranks agree on each collective before its data moves, by default yes: a message between the hosts each. The
            steps of DistributedOptimizer agree in any case.
        shared_dir: directory that all ranks see, through which large objects go (`hora.broadcast_object`); by default what the launcher was
            told. Where the ranks do not see the same they go over the network.

    Returns:
        The session, which `session()` returns from now on. A second call without arguments returns the session in force.

    Raises:
        ConfigError: an argument or a variable is wrong, the backend is not available here, or there are fewer GPUs than ranks.
        RendezvousTimeout: ranks are missing at the deadline; the message names them.
        CollectiveMismatch: ranks were started with different world sizes, backends, versions, scripts or configurations.
        PeerLost: a rank has ended before all had met, or while they connected.
    """
    global _session, _sessions_begun
    asked = (backend, device, init_method, rank, world_size, timeout_s, exact, config, check_calls, shared_dir)
    if _session is not None:
        if _session.pid != os.getpid():
            raise ConfigError(
                f"this process was forked from that of rank {_session.rank} and cannot be a rank too; start ranks with hora run"
            )
        if any(value is not None for value in asked):
            raise ConfigError("hora.init was called a second time with arguments; call hora.shutdown() first to join anew")
        return _session
    _require_run_script()
    deadline = Deadline(_timeout_s(timeout_s))
    shared = SharedDirectory(choose_shared_dir(shared_dir))
    device = None if device is None else torch.device(device)
    if dist.is_initialized():
        placed = any(value is not None for value in (init_method, rank, world_size))
        place, chosen, device = adopt(backend, device, placed)
    else:
        place = find_place(init_method, rank, world_size, parent_pid=os.getppid(), backend=backend)
        chosen, device = choose_backend_and_device(backend, device, place.topology.world_size)
    with ExitStack() as release:
        settings = Settings(Exact.choose(exact), config or {}, check_calls is not False, backend)
        _session = _join(place, chosen, device, settings, shared, deadline, release, _sessions_begun)
    if _sessions_begun == 0:
        atexit.register(_leave_at_exit)
    _sessions_begun += 1
    try:
        events.tell_joined()
    except BaseException as error:
        _leave(error)
        raise
    return _session


def _join(
    place: Place,
    backend: Backend,
    device: torch.device,
    settings: Settings,
    shared: SharedDirectory,
    deadline: Deadline,
    release: ExitStack,
    ordinal: int,
) -> Session:
    topology, generation, exact = place.topology, _generation(), settings.exact
    if exact is not None:
        LogicalRanks(exact.logical_ranks, topology.world_size)  # refuses more real ranks than logical ones
    release.enter_context(reproducible(exact, device))
    mine = introduce(topology, backend.name, device, settings)
    # Names of their own for each start of the job and each session of a process: nobody reads what an earlier one left.
    with _waiting_for_others(topology, ordinal):
        store, records = _meet(place.meeting.of_session(ordinal), mine, f"hora/{generation}/{ordinal}", deadline, release)
    if not place.local_known:
        records = place_by_hosts(records)
    elif not place.node_known:
        records = number_nodes(records)
    if not (place.local_known and place.node_known):
        topology = _place_among(topology, records)
    device, turn = settle_device(device, mine.rank, records)
    release.enter_context(variables_set(_socket_variables(backend, mine, records, place.meeting.host_of_zero)))
    release.enter_context(variables_set(backend.environment_on_shared_gpu(turn)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    events.fault_point("init.met", rank=topology.rank)
    backend = _start_group(backend, settings.backend is not None, store, records, topology, device, deadline.timeout_s)
    release.callback(backend.end_group)
    assert dist.group.WORLD is not None
    nodes = Nodes.of([record.node_rank for record in records])
    # A file of the user's must not decide about the bits of exact mode: there "auto" is "native".
    table = algorithm_table(records[0].algorithms) if exact is None else Table()
    groups = release.enter_context(closing(Groups(dist.group.WORLD, nodes, deadline.timeout_s, table)))
    hosts = backend.group_of_hosts(deadline.timeout_s, one_host=several_hosts(records) is None) if topology.world_size > 1 else None
    release.callback(pulse.mine().close)
    pulse.mine().open(deadline.timeout_s)
    progress = release.enter_context(closing(Progress(store, records, topology.rank)))
    num_numbers = _STEP_FLAGS + (exact.logical_ranks if exact else 1)
    roll_call = release.enter_context(closing(RollCall(hosts, store, progress, topology.rank, topology.world_size, num_numbers)))
    del hosts  # nobody else may hold the group
    if shared.base is not None and topology.local_rank == 0:
        sweep(shared.base)
    release.callback(shared.close)
    log.configure(topology.rank, topology.world_size)
    events.fault_point("init.joined", rank=topology.rank)
    return Session(
        topology=topology,
        device=device,
        backend=backend.name,
        store=store,
        group=groups.world,
        groups=groups,
        generation=generation,
        timeout_s=deadline.timeout_s,
        exact=exact,
        check_calls=settings.check_calls,
        records=records,
        progress=progress,
        roll_call=roll_call,
        release=release.pop_all(),
        shared=shared,
    )


def _start_group(
    backend: Backend, asked: bool, store: Store, records: Sequence[Record], topology: Topology, device: torch.device, timeout_s: float
) -> Backend:
    """Starts the group; the backend that it has, which is another than `backend` where that cannot serve these ranks and nobody asked for it."""
    try:
        problem = several_hosts(records) if backend.one_host else None
        if problem is None:
            backend.start_group(store, topology.rank, topology.world_size, device, timeout_s)
            return backend
    except CannotShare as error:
        problem = str(error)
    except RuntimeError as error:
        raise PeerLost(
            f"rank {topology.rank} met all {topology.world_size} ranks but could not connect to all of them with {backend.name}: see the logs "
            f"for a rank that has ended since, and whether the nodes reach each other. The backend says: {error}"
        ) from error
    stand_in = backend.stand_in()
    if asked or stand_in is None:
        raise ConfigError(f'backend "{backend.name}" serves ranks of one host that share memory, but {problem}')
    log.get_logger().debug("%s in place of %s: %s", stand_in.name, backend.name, problem)
    return _start_group(stand_in, True, store, records, topology, device, timeout_s)


def _place_among(topology: Topology, records: Sequence[Record]) -> Topology:
    mine = records[topology.rank]
    return replace(
        topology,
        local_rank=mine.local_rank,
        local_world_size=len(neighbours_of(mine, records)),
        node_rank=mine.node_rank,
        num_nodes=len({record.node_rank for record in records}),
    )


def _meet(meeting: Meeting, mine: Record, prefix: str, deadline: Deadline, release: ExitStack) -> tuple[Store, list[Record]]:
    """The store, with all ranks known to each other."""
    while True:
        with ExitStack() as attempt:
            try:
                met = meeting.open(mine.rank, mine.world_size, deadline, attempt)
                # Torch keeps the C++ half of a store alone; the half written in Python must live until all is closed.
                attempt.callback(id, met)
                store = PrefixStore(prefix, met)
                records = exchange_records(store, mine, deadline, meeting.hint, partial(meeting.ended, met))
            except (ConnectionError, dist.DistNetworkError) as error:
                # A rank that joins anew can come while rank 0 is about to close the store of the session before.
                if deadline.passed:
                    raise RendezvousTimeout(str(error)) from error
                continue
            release.push(attempt.pop_all())
            return store, records


def _waiting_for_others(topology: Topology, ordinal: int) -> AbstractContextManager[None]:
    """Where ranks may never come, and nothing has begun, it is heeded at once that this process is to end.

    Those of a group that exists already have come, and so have those of an earlier session: there may be something to save.
    """
    met = ordinal > 0 or dist.is_initialized()
    return awaiting_others(topology.rank) if topology.started_by_hand and not met else nullcontext()


def _require_run_script() -> None:
    # Set while a process that was spawned, not forked, imports the script; multiprocessing's own check relies on it too.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "hora.init() was called in a process that only imports this script, such as a worker of a data loader: put what the script does "
            'under if __name__ == "__main__":'
        )


def _timeout_s(asked: float | None, environ: Mapping[str, str] = os.environ) -> float:
    text = environ.get(env.TIMEOUT_S)
    try:
        timeout_s = asked if asked is not None else float(text) if text else DEFAULT_TIMEOUT_S
    except ValueError:
        timeout_s = -1.0
    if not 0 < timeout_s <= env.LONGEST_S:
        name, value = ("timeout_s", asked) if asked is not None else (env.TIMEOUT_S, text)
        raise ConfigError(f"{name} must be a positive number of seconds, {env.LONGEST_S:.0e} at most, but is {value!r} instead")
    return timeout_s


def _generation(environ: Mapping[str, str] = os.environ) -> int:
    return env.JobEnv.read(environ).generation or env.whole_number("TORCHELASTIC_RESTART_COUNT", environ) or 0


def _socket_variables(backend: Backend, mine: Record, records: Sequence[Record], host_of_zero: str | None) -> Mapping[str, str]:
    others = [record.host for record in records if record.host != mine.host]
    if not others and any(record.node_rank != mine.node_rank for record in records):
        others = [mine.host]  # hosts of one name
    # Names of the others may not be known here, or lead back; that of rank 0's host has led there.
    interface = choose_interface([*others, host_of_zero] if others and host_of_zero else others)
    if interface is None and set(others) == {mine.host}:
        interface = choose_interface([])  # one host as if it were several
    return {} if interface is None else backend.environment(interface)


def shutdown() -> None:
    """Leaves the job; does nothing when this process is in none. `init` can be called again afterwards."""
    _leave(sys.exc_info()[1])


def _leave_at_exit() -> None:
    if _session is not None and _session.device.type == "cuda":
        reset_graphs()
    _leave(getattr(sys, "last_value", None))  # the exception that nobody caught and that ends the interpreter


def _leave(error: BaseException | None) -> None:
    global _session
    if _session is not None and _session.pid != os.getpid():
        return  # forked from the rank, which goes on
    if _session is not None and (error is None or (isinstance(error, SystemExit) and not error.code)):
        for act in _session.before_leaving:
            act()
    ending, _session = _session, None
    if ending is not None:
        ending.progress.leave_for(error)
        ending.close()


def is_initialized() -> bool:
    """Whether this process is in a job: after `init`, before `shutdown`."""
    return _session is not None


def session() -> Session:
    """The session in force.

    Raises:
        HoraError: `init` was not called, or `shutdown` was.
    """
    if _session is None:
        if get_worker_info() is not None:
            raise HoraError(
                "this data worker was not forked from its rank, as with CUDA, and is in no job: ask Hora in the script, and give the data set what "
                "it needs to know"
            )
        raise HoraError("this process is in no job; call hora.init() first")
    return _session


def rank() -> int:
    """Index of this process in the job, from 0."""
    return session().rank


def world_size() -> int:
    """Number of processes in the job."""
    return session().world_size


def local_rank() -> int:
    """Index of this process among those of its node, from 0."""
    return session().topology.local_rank


def device() -> torch.device:
    """Where this rank's tensors live."""
    return session().device
