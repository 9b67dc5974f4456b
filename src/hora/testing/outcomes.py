"""What became of a body on each rank, and how that reads."""

import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from hora.comm.deadline import Deadline
from hora.testing.process import Rank

GRACE_S = 2.0
"""How long the other ranks may go on after one has failed: long enough to notice it and to say so."""

_STACK_PATIENCE_S = 1.0
_POLL_S = 0.01

Kind = Literal["passed", "skipped", "failed", "died", "hung", "ended"]
_BAD = ("failed", "died", "hung")


@dataclass(frozen=True)
class Outcome:
    """How a body ended on one rank.

    Attributes:
        rank: the rank.
        kind: "failed" is an exception, "died" the end of the process, "hung" the deadline, "ended" that it still ran when another rank had
            failed.
        text: traceback, exit or stack.
        printed: what the rank wrote on standard output and error.
        result: what the body returned.
        clean: whether the rank's session is as it was, so that the rank can run another body.
    """

    rank: int
    kind: Kind
    text: str = ""
    printed: str = ""
    result: Any = None
    clean: bool = False

    @property
    def bad(self) -> bool:
        """Whether the test must fail for it."""
        return self.kind in _BAD


class RanksFailed(AssertionError):
    """A body went wrong on at least one rank; the message says what each rank did."""


def gather(ranks: Mapping[int, Rank], timeout_s: float) -> list[Outcome]:
    """Waits for what becomes of the request that each of `ranks` was given; by rank.

    Ranks that are not done at the deadline, or shortly after another one has failed, are shown with their stacks and killed.
    """
    deadline = Deadline(timeout_s)
    while (waiting := {number: rank for number, rank in ranks.items() if rank.answer is None}) and not deadline.passed:
        for number in hear(waiting, deadline.remaining_s):
            if (ranks[number].answer or {}).get("kind") in _BAD and deadline.remaining_s > GRACE_S:
                deadline = Deadline(GRACE_S)
    failed = any(rank.answer["kind"] in _BAD for rank in ranks.values() if rank.answer)
    printed = {number: rank.printed() for number, rank in ranks.items()}
    # All stacks before the first rank is killed: its end would move the others.
    for rank in waiting.values():
        rank.answer = _describe_running(rank, "ended" if failed else "hung", timeout_s)
    for rank in waiting.values():
        rank.end()
    return [Outcome(number, printed=printed[number], **(rank.answer or {})) for number, rank in sorted(ranks.items())]


def hear(ranks: Mapping[int, Rank], timeout_s: float) -> list[int]:
    """Waits until one of `ranks` says something, and takes it; which ones did."""
    with selectors.DefaultSelector() as selector:
        for number, rank in ranks.items():
            selector.register(rank.sock, selectors.EVENT_READ, number)
        heard: list[int] = [key.data for key, _ in selector.select(timeout_s)]
    for number in heard:
        ranks[number].hear()
    return heard


def _describe_running(rank: Rank, kind: Kind, timeout_s: float) -> dict[str, Any]:
    stopped = _is_stopped(rank.pid)
    if kind == "ended":
        text = f"still running {GRACE_S:.0f} s after the failure, and ended"
    else:
        text = f"{'is stopped' if stopped else 'still running'} after {timeout_s:.0f} s"
    return {"kind": kind, "text": text if stopped else f"{text}\n{_stack(rank)}".rstrip()}


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _stack(rank: Rank) -> str:
    """The Python stacks of a running rank, which it writes when it is sent SIGUSR2."""
    before = rank.printed()
    rank.signal(signal.SIGUSR2)
    patience = Deadline(_STACK_PATIENCE_S)
    while not patience.passed and "most recent call first" not in rank.printed()[len(before) :]:
        time.sleep(_POLL_S)
    return rank.printed()[len(before) :]


def report(outcomes: Sequence[Outcome]) -> str:
    """What every rank did, the failures first."""
    blocks = []
    for outcome in sorted(outcomes, key=lambda outcome: (not outcome.bad, outcome.rank)):
        block = f"rank {outcome.rank} of {len(outcomes)} {outcome.kind}" + (f": {outcome.text}" if outcome.text else "")
        if outcome.printed and outcome.kind != "passed":
            block += f"\n--- printed by rank {outcome.rank} ---\n{outcome.printed}"
        blocks.append(block.rstrip())
    return "\n\n".join(blocks)
