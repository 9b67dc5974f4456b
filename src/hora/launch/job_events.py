"""What happens in a job, as its launchers tell each other, and what a launcher is to do about it: the events and actions of the supervisor.

Plain facts, which know no process, socket or clock.
"""

from dataclasses import dataclass

SAVED_EXIT_CODE = 75
"""A rank ends with it (EX_TEMPFAIL) when it was asked to stop and has saved its state: starting again goes on from there."""

HANG_EXIT_CODE = 124
"""Of a job that made no progress any more, as of `timeout`."""


@dataclass(frozen=True)
class RankEnded:
    """A rank of this node ended by itself or by a signal (`code` is then negative).

    `blames_peer`: its last words were about another rank that is gone, so that it is hardly the cause; `lost`: the ranks that they name.
    """

    rank: int
    code: int
    blames_peer: bool = False
    lost: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RankDoomed:
    """A rank of this node still lives, but its last words are the traceback of an error of its own: it is about to end with code 1."""

    rank: int


@dataclass(frozen=True)
class HangFound:
    """The job makes no progress, because of a rank of any node. `report` is what to tell people, `details` what to keep for them."""

    rank: int
    report: str
    details: str = ""


@dataclass(frozen=True)
class SignalArrived:
    """This launcher received a signal."""

    signum: int


@dataclass(frozen=True)
class RegroupWanted:
    """The job could run on other hosts than it does, with more ranks or without hosts that are to leave."""


@dataclass(frozen=True)
class Shared:
    """Something that the launcher of node `node` tells all launchers."""

    node: int


@dataclass(frozen=True)
class FailureSeen(Shared):
    """A rank failed. `report` is what to tell people, `details` what to keep for them."""

    rank: int
    code: int
    report: str = ""
    details: str = ""


@dataclass(frozen=True)
class StopAsked(Shared):
    """Somebody asked for the end of the job by sending `signum` to a launcher; SIGKILL stands for a second Ctrl-C."""

    signum: int


@dataclass(frozen=True)
class SaveAsked(Shared):
    """The ranks are to save and to end before their time, so that the job can go on with others."""


@dataclass(frozen=True)
class SaveSeen(Shared):
    """A rank saved and ended before its time: it was told to by its scheduler, and the others will have been told too."""

    rank: int


@dataclass(frozen=True)
class NodeDone(Shared):
    """All ranks of a node have ended. `saved`: one of them ended after saving, before its time."""

    saved: bool


@dataclass(frozen=True)
class NodeLost(Shared):
    """The launcher of a node is gone without a word."""


Event = RankEnded | RankDoomed | HangFound | SignalArrived | RegroupWanted | Shared


@dataclass(frozen=True)
class StartRanks:
    """Start the ranks of this node."""


@dataclass(frozen=True)
class SignalRanks:
    """Send a signal to the ranks that live: SIGKILL to all that they started as well, any other to their own processes alone."""

    signum: int


@dataclass(frozen=True)
class AskToSave:
    """Ask the ranks of this node to save and to end, if that does them no harm."""


@dataclass(frozen=True)
class TellRanks:
    """Let ranks that wait for `rank` know that it has ended well, and comes no more."""

    rank: int


@dataclass(frozen=True)
class Publish:
    """Tell all launchers, this one included."""

    event: Shared


@dataclass(frozen=True)
class Finish:
    """The job is over for this node. `cause` is what ended it before its time; `unkillable` are ranks that survived being killed.

    `asked`: whether somebody has asked for the end, if only when it was near already. `regroup`: whether the launchers have asked the ranks to
    save and to end, and nobody else has. `logs`: where those of the ranks are, for people. `fleeting`: whether what the ranks saved is for those that
    this job starts anew, and gone with it.
    """

    exit_code: int
    cause: Shared | None
    unkillable: frozenset[int] = frozenset()
    asked: bool = False
    regroup: bool = False
    logs: str = ""
    fleeting: bool = False


Action = StartRanks | SignalRanks | AskToSave | TellRanks | Publish | Finish
