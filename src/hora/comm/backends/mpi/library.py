"""MPI in this process, through mpi4py: loaded once, when a group first needs it, and left in an orderly way when the process ends.

MPI reports nothing about ranks that die and waits without a deadline. So every call here is a nonblocking one that is tested until it is done
or late, and while a wait lasts the processes of this host are looked at. Nothing here needs torch.
"""

import atexit
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module, util
from typing import Any

import psutil

from hora.comm.backends.queued import Failed
from hora.errors import ConfigError

INSTALL = 'pip install "hora[mpi]"'

_SPIN_S, _SPIN_BYTES_PER_S = 0.005, 1e8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3
_LOOK_EVERY_S = 0.25
_RECORD_BYTES = 256
_SEGMENT = re.compile(r"/dev/shm/mpich_shm_\S+")

# One node needs no network: without these MPICH listens on every interface of the machine, to whoever comes.
_ONE_NODE = {"UCX_TLS": "self,shm", "FI_TCP_IFACE": "lo"}


@dataclass(frozen=True)
class Neighbour:
    """The process of a rank, as it tells the others."""

    host: str
    pid: int
    started_s: float

    def pack(self) -> bytes:
        """The record in a fixed number of bytes."""
        return f"{self.pid} {self.started_s!r} {self.host}".encode()[:_RECORD_BYTES].ljust(_RECORD_BYTES)

    @classmethod
    def unpack(cls, record: bytes) -> "Neighbour":
        """What `pack` made a record of."""
        pid, started_s, host = record.decode(errors="replace").split(maxsplit=2)
        return cls(host.strip(), int(pid), float(started_s))

    @property
    def gone(self) -> bool:
        """Whether the process has ended, as far as its own host can tell."""
        try:
            process = psutil.Process(self.pid)
            return process.create_time() != self.started_s or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False


class Library:
    """MPI, initialised.

    Attributes:
        mpi: the module `mpi4py.MPI`.
        comm: all ranks.
        neighbours: the ranks whose processes this one can see, once `look_around` was called.
        elsewhere: name of a host that is not this one; None when all ranks are here.
        failed: whether a call has not come to its end, so that MPI is of no use any more.

    Raises:
        ConfigError: mpi4py or MPI itself cannot be loaded, or MPI does not let threads call it.
    """

    def __init__(self) -> None:
        self.mpi = _load()
        self.comm = self.mpi.COMM_WORLD
        self.neighbours: dict[int, Neighbour] = {}
        self.elsewhere: str | None = None
        self.failed = False
        level = self.mpi.Query_thread()
        if level < self.mpi.THREAD_SERIALIZED:
            raise ConfigError(
                "MPI must let a process's threads call it one after the other, but it was initialised without; leave MPI's initialisation to "
                "Hora, or ask mpi4py for more (mpi4py.rc.thread_level)"
            )
        several = level >= self.mpi.THREAD_MULTIPLE
        self.lock: AbstractContextManager[Any] = nullcontext() if several else threading.RLock()

    @property
    def rank(self) -> int:
        """Of this process among all."""
        return int(self.comm.Get_rank())

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return int(self.comm.Get_size())

    @property
    def name(self) -> str:
        """The library and its version, in one line."""
        return " ".join(str(self.mpi.Get_library_version()).replace("\0", "").split("\n")[0].replace("Version:", "").split())

    def require_place(self, rank: int, world_size: int) -> None:
        """Sees that MPI agrees about this process's place.

        Raises:
            ConfigError: it does not: the process was started by another MPI's launcher, or by none.
        """
        if (self.rank, self.size) != (rank, world_size):
            raise ConfigError(
                f"this process is rank {rank} of {world_size} by its environment, but rank {self.rank} of {self.size} by MPI ({self.name}): start "
                f"the ranks with that MPI's own mpiexec, or {INSTALL} and start them with `hora run --mpi`"
            )

    def look_around(self, timeout_s: float) -> None:
        """Has all ranks say which process they are.

        Collective: all ranks call it.
        """
        if self.neighbours or self.elsewhere is not None or self.size == 1:
            return
        host, process = socket.gethostname(), psutil.Process()
        mine = Neighbour(f"{host} {_pid_namespace()}", process.pid, process.create_time())
        records = bytearray(_RECORD_BYTES * self.size)
        self.run(lambda: self.comm.Iallgather([mine.pack(), self.mpi.BYTE], [records, self.mpi.BYTE]), "look_around", timeout_s)
        cut = [Neighbour.unpack(bytes(records[at : at + _RECORD_BYTES])) for at in range(0, len(records), _RECORD_BYTES)]
        self.neighbours = {rank: other for rank, other in enumerate(cut) if other.host == mine.host and rank != self.rank}
        self.elsewhere = next((name for other in cut if (name := other.host.split()[0]) != host), None)
        _unlink_segments()

    def assemble(self, members: Sequence[int], timeout_s: float) -> Any:
        """A communicator for the ranks `members`, in this order; the others need not call.

        Collective: all members call it.
        """
        if list(members) == list(range(self.size)):
            made: list[Any] = []

            def duplicate() -> Any:
                comm, request = self.comm.Idup()
                made.append(comm)
                return request

            self.run(duplicate, "making the group", timeout_s)
            return made[0]
        self._await_members(members, timeout_s)
        group = self.comm.Get_group().Incl(list(members))
        with self.lock:  # it does not wait for long: all are there
            comm = self.comm.Create_group(group)
        group.Free()
        return comm

    def _await_members(self, members: Sequence[int], timeout_s: float) -> None:
        """Returns when all have come; MPI's own call for making a group would wait without a deadline."""
        first, word = members[0], bytearray(1)
        others = members[1:] if self.rank == first else [first]
        calls = (self.comm.Irecv, self.comm.Isend) if self.rank == first else (self.comm.Isend, self.comm.Irecv)
        for call in calls:
            for other in others:
                post = partial(call, [word, self.mpi.BYTE], other, _ASSEMBLY_TAG)
                self.run(post, f"making a group with rank {other}", timeout_s, ranks=[other])

    def run(self, post: Callable[[], Any], what: str, timeout_s: float, size_bytes: int = 0, ranks: Collection[int] | None = None) -> Any:
        """Makes a nonblocking call and waits until it is done; returns its status.

        Args:
            post: makes the call and returns the request.
            what: the call, for people.
            timeout_s: how long to wait.
            size_bytes: how much it moves: so much longer it is asked for without a pause.
            ranks: whom it may wait for; by default everybody.

        Raises:
            Failed: it timed out, a rank is gone, or MPI says no.
        """
        try:
            with self.lock:
                request = post()
        except self.mpi.Exception as error:
            self.failed = True
            raise Failed(f"MPI failed in {what}: {error}") from error
        try:
            return self.complete(request, what, timeout_s, size_bytes, ranks)
        except Failed:
            raise
        except BaseException:  # of a handler of a signal
            self._abandon(request)
            raise

    def complete(self, request: Any, what: str, timeout_s: float, size_bytes: int = 0, ranks: Collection[int] | None = None) -> Any:
        """Waits for a request, as `run` does."""
        status, begun_s = self.mpi.Status(), time.monotonic()
        spin_s, pause_s, look_s = _SPIN_S + size_bytes / _SPIN_BYTES_PER_S, _FIRST_PAUSE_S, _LOOK_EVERY_S
        while not self.test(request, what, status):
            waited_s = time.monotonic() - begun_s
            if waited_s <= spin_s:
                time.sleep(0)
                continue
            if waited_s > look_s:
                self._look_for_the_dead(request, what, ranks)
                look_s = waited_s + _LOOK_EVERY_S
            if waited_s > timeout_s:
                self._abandon(request)
                raise Failed(f"timed out: rank {self.rank} waited {waited_s:.1f} s in {what}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return status

    def test(self, request: Any, what: str, status: Any = None) -> bool:
        """Whether a request is done; moves on what is under way."""
        try:
            with self.lock:
                return bool(request.Test(status))
        except self.mpi.Exception as error:
            self.failed = True
            raise Failed(f"MPI failed in {what}: {error}") from error

    def _look_for_the_dead(self, request: Any, what: str, ranks: Collection[int] | None) -> None:
        for number, neighbour in self.neighbours.items():
            if (ranks is None or number in ranks) and neighbour.gone:
                self._abandon(request)
                where = neighbour.host.split()[0]
                raise Failed(f"connection lost: rank {number} (process {neighbour.pid} on {where}) is gone; rank {self.rank} was in {what}")

    def _abandon(self, request: Any) -> None:
        """Keeps what MPI may still write to, for as long as the process lives: what has begun cannot be taken back."""
        self.failed = True
        _abandoned.append(request)

    def leave(self) -> None:
        """Ends MPI when the process does; waits for the others, without a deadline, as MPI wants it.

        After a failure the others would wait for this rank, or it for them: then it just ends, and whoever started the job ends the rest.
        """
        if ended_badly():
            _unlink_segments()
        if self.mpi.Is_finalized() or (ended_badly() and _in_charge):
            return
        if self.failed or ended_badly():
            self._abort()
        try:
            self.run(self.comm.Ibarrier, "the end", float("inf"))
        except Failed as error:
            sys.stderr.write(f"hora: {error}\n")
            self._abort()
        self.mpi.Finalize()

    def _abort(self) -> None:
        sys.stdout.flush()  # MPI ends the process on the spot
        sys.stderr.flush()
        time.sleep(_LAST_WORDS_S)  # mpiexec drops what it has not read yet when it ends the job
        self.comm.Abort(1)


_ASSEMBLY_TAG = 4711
_LAST_WORDS_S = 0.3
_abandoned: list[Any] = []
_library: Library | None = None
_in_charge: bool | None = None
_script_failed = False


def library() -> Library:
    """MPI, initialised when it is first asked for."""
    global _library
    if _library is None:
        _library = Library()
    return _library


def why_not_here() -> str | None:
    """Why MPI cannot be used in this installation; None if nothing speaks against it."""
    return None if util.find_spec("mpi4py") is not None else f"mpi4py is not installed: {INSTALL}"


def tell_failure() -> None:
    """The script has failed: the process is about to end with a code that is not 0."""
    global _script_failed
    _script_failed = True


def ended_badly() -> bool:
    """Whether the process ends for an error that nobody caught."""
    return _script_failed or getattr(sys, "last_value", None) is not None


def take_charge() -> None:
    """Has MPI end as `Library.leave` says, and stay on this node if all ranks do; to be called before anybody loads MPI, if that can be.

    mpi4py itself would have a rank that fails wait for the others, which wait for it.
    """
    global _in_charge
    if _in_charge is not None:
        return
    import mpi4py

    _in_charge = "mpi4py.MPI" not in sys.modules
    if _in_charge:
        mpi4py.rc.finalize = False
        if on_one_node(os.environ):
            for name, value in _ONE_NODE.items():
                os.environ.setdefault(name, value)
    atexit.register(_leave, os.getpid())


def _load() -> Any:
    if (reason := why_not_here()) is not None:
        raise ConfigError(f"backend mpi needs mpi4py and an MPI: {reason}")
    take_charge()
    try:
        return import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"mpi4py must find an MPI library, but: {error}; {INSTALL}, into this same environment ({sys.prefix})") from error


def on_one_node(environ: Mapping[str, str]) -> bool:
    """Whether the launcher says that all ranks are on this node."""
    for here, everywhere in (
        ("MPI_LOCALNRANKS", "PMI_SIZE"),
        ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ):
        if here in environ and everywhere in environ:
            return environ[here] == environ[everywhere]
    return False


def _leave(pid: int) -> None:
    if os.getpid() == pid and "mpi4py.MPI" in sys.modules:
        library().leave()


def _unlink_segments() -> None:
    """Takes the names of MPICH's shared memory away once all have it, so that none is left when a rank is killed."""
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8") as file:
        for name in set(_SEGMENT.findall(file.read())):
            with suppress(OSError):
                os.unlink(name)


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
