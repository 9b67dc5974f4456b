"""What to say about a rank that failed, from its exit code and the end of its log. Pure."""

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hora.launch.job_events import SAVED_EXIT_CODE, FailureSeen, Finish, NodeLost, SaveSeen, StopAsked

_MAX_LINES = 40
_LAST_LINES = 12
_TRACEBACK = "Traceback (most recent call last):"
# Python and its libraries may still say this many lines of farewell after the traceback that ends a process.
_AFTERTHOUGHTS = 5
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")

# How a rank says that another one is gone, in the words of Hora, of torch with Gloo, and of torch with NCCL.
_PEER_GONE = re.compile(
    r"\b(?:PeerLost|CollectiveTimeout|CollectiveError|DistNetworkError)\b|[Cc]onnection (?:closed by peer|reset by peer|refused|lost:)|"
    r"Broken pipe|Socket closed|remote process exited|ncclRemoteError|ncclSystemError|Horovod has been shut down"
)
# How Hora names the ranks that are gone: its collectives, its groups in shared memory, `rank_zero_first`, and `hora.hvd`.
_LOST = re.compile(
    r"\brank \d+ lost ranks? (\d+(?:, \d+)*(?: and \d+)?) in |\brank (\d+) has left the group|\brank (\d+) went first and failed|"
    r"Horovod has been shut down\. Rank (\d+) |caused by an exception on rank (\d+)"
)


@dataclass(frozen=True)
class Casualty:
    """A rank that failed. `code` is negative for a signal; `memory_kills` is how many processes of the node the kernel has killed for want
    of memory since the job began, None if it does not say.
    """

    rank: int
    host: str
    pid: int
    code: int
    log: str
    tail: bytes
    memory_kills: int | None = None


def blames_peer(tail: bytes) -> bool:
    """Whether the last words of a rank are about another rank that is gone."""
    lines = last_words(tail)
    return bool(lines) and _PEER_GONE.search("\n".join(lines[-_LAST_LINES:])) is not None


def lost_peers(tail: bytes) -> frozenset[int]:
    """The ranks that are gone, as far as the last words of a rank that blames others name them."""
    found = _LOST.findall("\n".join(last_words(tail)[-_LAST_LINES:]))
    return frozenset(int(number) for groups in found for named in groups for number in re.findall(r"\d+", named))


def is_doomed(tail: bytes) -> bool:
    """Whether the last words of a rank are the traceback of an error of its own, with hardly anything after it."""
    traceback, after = _last_traceback(_lines(tail))
    return bool(traceback) and len(after) <= _AFTERTHOUGHTS and not blames_peer(tail)


def describe(casualty: Casualty) -> str:
    """The report on a rank that failed, in several lines."""
    head = f"rank {casualty.rank} failed on {casualty.host} (process {casualty.pid}): {_describe_code(casualty.code)}"
    if casualty.code == -signal.SIGKILL:
        head += _explain_kill(casualty.memory_kills)
    elif casualty.memory_kills:
        head += "; out of memory: the kernel has killed a process here, such as a data loader's worker"
    words = last_words(casualty.tail)
    quoted = [f"  {line}" for line in words] or ["  (it wrote nothing)"]
    return "\n".join([head, *quoted, f"its log: {casualty.log}"])


def explain_loss(node: int) -> str:
    """What is known of the launcher of another node that is gone."""
    return f"the launcher of node {node} is gone, so the ranks here were ended; see its output on that node"


def explain_survivors(left: Sequence[int]) -> str:
    """Names processes that could not be killed; empty if there are none."""
    return f"still there after SIGKILL: {', '.join(map(str, left))}" if left else ""


def explain_end(finish: Finish, loss: Callable[[int], str] = explain_loss) -> str:
    """Why a job ended before its time; empty if it did not. `loss` knows what happened to the launcher of a node."""
    match finish.cause:
        case FailureSeen(report=text, rank=rank):
            return text or f"rank {rank} failed"
        case StopAsked(signum=signum) if signum != signal.SIGTERM:
            return "ended by Ctrl-C"
        case StopAsked() | SaveSeen() if finish.exit_code == SAVED_EXIT_CODE and finish.fleeting:
            return ""  # whether it is the end is not known here, nor what has become of what was saved
        case StopAsked() if finish.exit_code == SAVED_EXIT_CODE:
            return "ended by SIGTERM after a save; start again to go on from where the ranks say that it is kept"
        case StopAsked():
            return f"ended by SIGTERM; no rank said, by exit code {SAVED_EXIT_CODE}, that it had saved"
        case SaveSeen() if finish.regroup:
            return ""  # it is not the end
        case SaveSeen(rank=rank):
            return f"rank {rank} ended before its time after a save; start again to go on from where the ranks say that it is kept"
        case NodeLost(node=node):
            return loss(node)
        case _:
            return ""


def last_words(tail: bytes) -> list[str]:
    """The last traceback in the end of a log and what follows it, or the last lines if there is none."""
    lines = _lines(tail)
    traceback, after = _last_traceback(lines)
    found = traceback + after
    if not found:
        return lines[-_LAST_LINES:]
    return found if len(found) <= _MAX_LINES else [found[0], "  ...", *found[2 - _MAX_LINES :]]


def _lines(tail: bytes) -> list[str]:
    """The lines that say something, without colours, and without the rank that torch puts in front."""
    text = _ESCAPE_SEQUENCE.sub("", tail.decode(errors="replace")).replace("\r\n", "\n")
    lines = [_TORCH_PREFIX.sub("", line.rpartition("\r")[2]) for line in text.split("\n")]
    return [line for line in lines if line.strip()]


def _last_traceback(lines: list[str]) -> tuple[list[str], list[str]]:
    """The last traceback, up to the line that names the error, and the lines after it; nothing if there is none."""
    begins = [index for index, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    if not begins:
        return [], []
    found = lines[begins[-1] :]
    length = next((index for index, line in enumerate(found[1:], start=2) if not line.startswith(" ")), len(found))
    return found[:length], found[length:]


def _describe_code(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _explain_kill(memory_kills: int | None) -> str:
    if memory_kills:
        return "; out of memory: the kernel killed it (the memory group's oom_kill count has risen)"
    if memory_kills is None:
        return "; by hand, or by the kernel for want of memory: see `dmesg`"
    return "; by hand: the kernel has counted no process here that it killed for want of memory"
