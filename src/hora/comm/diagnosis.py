"""Why a collective failed, from what is known of every rank. Pure, but for looking at processes of this host."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import psutil
import torch

from hora.comm.dtypes import dtype_name
from hora.comm.records import Record, say_ranks
from hora.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, PeerLost


class Call(NamedTuple):
    """One collective, or one message to or from `peer`, on this rank; one is made for each, so it must be cheap."""

    kind: str
    sequence: int
    size_bytes: int
    dtype: torch.dtype | None
    world_size: int
    peer: int | None
    begun_s: float
    among: tuple[int, ...] | None = None
    """The ranks that make it, where these are not all."""

    @property
    def is_numbered(self) -> bool:
        """Whether all ranks make it, so that its number says how far each is."""
        return self.peer is None and self.among is None

    def concerns(self, rank: int) -> bool:
        """Whether `rank` makes it too."""
        return self.among is None or rank in self.among

    def __str__(self) -> str:
        number = f" #{self.sequence}" if self.is_numbered else ""
        if self.among is not None:
            number = f" among {say_ranks(self.among)}"
        dtype = "no tensor" if self.dtype is None else dtype_name(self.dtype)
        return f"{self.kind}{number} ({say_bytes(self.size_bytes)}, {dtype}, {self.world_size} ranks)"


@dataclass(frozen=True)
class Status:
    """What a rank says of its progress. `beat` grows as long as it lives; `kind` is that of collective number `begun`; `reason` is why it left."""

    beat: int = 0
    begun: int = 0
    finished: int = 0
    kind: str = ""
    left: bool = False
    reason: str = ""


class Condition(Enum):
    """What the host knows of a rank's process."""

    GONE = "is gone"
    STOPPED = "is stopped (SIGSTOP)"
    RUNNING = "runs"
    UNKNOWN = "is on another host"


@dataclass(frozen=True)
class Picture:
    """What one rank knows of another: its last status, whether it has spoken since the failure, and the condition of its process."""

    record: Record
    status: Status | None
    alive: bool
    condition: Condition

    def fault_in(self, call: Call) -> str | None:
        """What is wrong with the rank with regard to `call`, as a clause about it; None when nothing is known to be."""
        status = self.status or Status()
        last = _say_last(status.finished, self.alive or status.left)
        process = f"(process {self.record.pid} on {self.record.host})"
        if status.left:
            return f"has ended with {status.reason}; {last}" if status.reason else f"has ended or called hora.shutdown; {last}"
        if self.condition in (Condition.GONE, Condition.STOPPED):
            return f"{process} {self.condition.value}; {last}"
        if not self.alive:
            return f"{process} does not answer; {last}"
        if not call.is_numbered:
            return f"{process} runs; {last}" if call.peer in (None, self.record.rank) else None
        if status.begun == call.sequence and status.kind != call.kind:
            return f"called {status.kind} #{status.begun} instead"
        if status.begun < call.sequence:
            return f"has not called it; {last}" if status.begun == status.finished else f"is still in {status.kind} #{status.begun}"
        return None

    @property
    def lost(self) -> bool:
        """Whether the rank will never answer."""
        return self.condition is Condition.GONE or (self.status is not None and self.status.left)


def _say_last(finished: int, certain: bool) -> str:
    """What a rank last finished; a rank that is silent may have come further than it could tell."""
    if certain:
        return f"it last finished #{finished}" if finished else "it has finished no collective yet"
    return f"it last reported #{finished} finished" if finished else "it has reported no finished collective"


def diagnose(call: Call, rank: int, waited_s: float, pictures: Sequence[Picture], error: str) -> CollectiveError:
    """The error that says why `call` failed on `rank`.

    Args:
        call: the collective.
        rank: this rank.
        waited_s: how long it had been under way.
        pictures: of all other ranks that take part.
        error: what the backend said.
    """
    pictures = [picture for picture in pictures if call.concerns(picture.record.rank)]
    faults = {picture.record.rank: fault for picture in pictures if (fault := picture.fault_in(call)) is not None}
    lost = [picture.record.rank for picture in pictures if picture.lost]
    clauses = " ".join(f"Rank {number} {fault}." for number, fault in faults.items())
    if lost:
        return PeerLost(f"rank {rank} lost {say_ranks(lost)} in {call}. {clauses} See the log of {say_ranks(lost)} for the reason.")
    if any("instead" in fault for fault in faults.values()):
        return CollectiveMismatch(f"all ranks must make the same calls in the same order; rank {rank} is in {call}. {clauses}")
    missing = f" for {say_ranks(list(faults))}" if faults else ""
    advice = (
        clauses or "All other ranks have called it: look for shapes or types that differ between ranks, and at the network between them."
    )
    if is_timeout(error):
        return CollectiveTimeout(f"rank {rank} waited {waited_s:.1f} s{missing} in {call}. {advice}")
    return PeerLost(f"rank {rank} lost a connection in {call}. {advice} The backend says: {error}")


def is_timeout(error: str) -> bool:
    """Whether the backend's message `error` speaks of a deadline."""
    return any(word in error.lower() for word in ("timed out", "timeout"))


def is_lost_connection(error: str) -> bool:
    """Whether the backend's message `error` speaks of a connection that broke."""
    return any(word in error.lower() for word in ("connection", "closed by peer", "broken pipe", "socket", "remote error"))


def condition(record: Record, mine: Record) -> Condition:
    """The condition of a rank's process, if this rank can see it."""
    if record.host != mine.host or record.pid_namespace != mine.pid_namespace:
        return Condition.UNKNOWN
    try:
        process = psutil.Process(record.pid)
        if process.create_time() != record.started_s or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return Condition.GONE
        return Condition.STOPPED if process.status() == psutil.STATUS_STOPPED else Condition.RUNNING
    except psutil.NoSuchProcess:
        return Condition.GONE
    except psutil.Error:
        return Condition.UNKNOWN


def say_bytes(size_bytes: int) -> str:
    """`17 bytes`, `4.0 MiB`."""
    size = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
