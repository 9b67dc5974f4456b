"""Where a rank stands when its job hangs, as the launchers tell each other, and which ranks are to blame. Pure."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hora.launch.job_events import Shared
from hora.pulse import Doing, Section


@dataclass(frozen=True)
class Standing:
    """Where a rank stands.

    Attributes:
        rank: which one; `host` and `pid` say where it is.
        state: of its process, in the letters of `/proc`; `?` where there is none.
        section: it is in; OUTSIDE for a rank that is in no job of Hora's, or has said nothing yet.
        doing: what it does there.
        steps: that it has ended.
        begun: collectives of all ranks that it has begun.
        finished: those it has finished.
        call: the collective that it has begun and not ended, in words; empty: none.
        silent_s: how long it has said nothing.
        stopped_s: how long its process has been stopped.
        limit_s: how long others may have to wait for it.
        given: whether the user has set that deadline.
        stopped_limit_s: how long it may be stopped.
        debugged: whether somebody looks at it with a debugger.
        missing: ranks that it knows others to wait for, which it is told of by all.
        note: how it says so, in a line for each.
        stacks: of its threads, as `faulthandler` writes them; empty where they could not be had.
    """

    rank: int
    host: str
    pid: int
    state: str
    section: Section = Section.OUTSIDE
    doing: Doing = Doing.OWN
    steps: int = 0
    begun: int = 0
    finished: int = 0
    call: str = ""
    silent_s: float = 0.0
    stopped_s: float = 0.0
    limit_s: float = float("inf")
    given: bool = False
    stopped_limit_s: float = float("inf")
    debugged: bool = False
    missing: tuple[int, ...] = ()
    note: str = ""
    stacks: str = ""

    @property
    def watched(self) -> bool:
        """Whether its silence means something."""
        return self.section is not Section.OUTSIDE

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return self.doing in (Doing.CALL, Doing.WAIT)

    @property
    def inside(self) -> bool:
        """Whether it is inside of something of Hora's, which comes to an end."""
        return self.waits or self.doing in (Doing.WORK, Doing.DEVICE)

    @property
    def stopped(self) -> bool:
        """Whether its process has been stopped for too long."""
        return self.stopped_s >= self.stopped_limit_s


@dataclass(frozen=True)
class StandingsAsked(Shared):
    """The launcher suspects that the job hangs: each is to tell where its ranks stand."""


@dataclass(frozen=True)
class StandingsTold(Shared):
    """Where the ranks of a node stand, as `to_text` writes it."""

    standings: str


@dataclass(frozen=True)
class Hang:
    """A job that makes no progress. `culprits` are the ranks that the others wait for; `silent_s` is for how long nobody has got on."""

    culprits: tuple[Standing, ...]
    silent_s: float

    @property
    def stopped(self) -> bool:
        """Whether that is because processes are stopped."""
        return self.culprits[0].stopped


def find_hang(standings: Sequence[Standing]) -> Hang | None:
    """The hang of a job whose ranks so stand, if it is one.

    It is one when no rank has said a word for longer than each rank that others may wait for is allowed to be silent. A rank outside of
    everything of Hora's is waited for only if another waits, or if the user has given it a deadline: what a script does on its own takes its time.
    """
    if any(standing.debugged for standing in standings):
        return None
    stopped = tuple(standing for standing in standings if standing.stopped)
    if stopped:
        return Hang(stopped, min(standing.stopped_s for standing in stopped))
    watched = [standing for standing in standings if standing.watched]
    if not any(standing.inside or standing.given for standing in watched):
        return None
    culprits = _awaited(watched)
    silent_s = min(standing.silent_s for standing in watched)
    return Hang(culprits, silent_s) if silent_s > max(culprit.limit_s for culprit in culprits) else None


def _awaited(watched: Sequence[Standing]) -> tuple[Standing, ...]:
    """The ranks that the others wait for: those of which one knows it, else those that do not wait, else those that lack a collective which others
    have begun, else all.
    """
    known = {rank for standing in watched for rank in standing.missing}
    missing = [standing for standing in watched if standing.rank in known]
    newest = max(standing.begun for standing in watched)
    busy = [standing for standing in watched if not standing.waits]
    behind = [standing for standing in watched if standing.begun < newest]
    return tuple(missing or busy or behind or watched)


def to_text(standings: Sequence[Standing]) -> str:
    """Standings as text."""
    return json.dumps([asdict(standing) for standing in standings])


def from_text(text: str) -> list[Standing]:
    """Reads what `to_text` wrote."""
    return [_standing(**fields) for fields in json.loads(text)]


def _standing(*, section: int, doing: int, missing: Sequence[int], **fields: Any) -> Standing:
    return Standing(section=Section(section), doing=Doing(doing), missing=tuple(missing), **fields)
