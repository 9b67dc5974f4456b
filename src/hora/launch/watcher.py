"""Watches over the progress of a job, with the launchers of its other nodes.

The launcher whose ranks seem to hang asks all of them, itself included, where their ranks stand; what they tell is put together, and only that
decides: a rank that waits says nothing about who it waits for. All launchers receive questions and answers in one order, so that one question at a
time is under way everywhere.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hora.launch import hang_report
from hora.launch.job_events import HangFound
from hora.launch.lookout import Lookout
from hora.launch.meeting import Line
from hora.launch.standing import Standing, StandingsAsked, StandingsTold, find_hang, from_text, to_text
from hora.launch.stragglers import Stragglers
from hora.launch.watch import LOOK_S, Watch
from hora.log import get_logger
from hora.pulse import Words

_ANSWER_S = 3.0
_ASK_AGAIN_S = 10.0
# A rank that has just said something is not disturbed: it may be anywhere in its work.
_QUIET_S = 1.0


@dataclass
class _Question:
    """What has been told so far, by node, in answer to the launcher of node `asker`."""

    asker: int
    ends: float
    told: dict[int, list[Standing]]


class Watcher:
    """Watches for the launcher of node `node` of `num_nodes`; `report_path` is where what is kept for people will be."""

    def __init__(self, watch: Watch, lookout: Lookout, line: Line, node: int, num_nodes: int, report_path: Path) -> None:
        self._watch = watch
        self._lookout = lookout
        self._line = line
        self._node = node
        self._num_nodes = num_nodes
        self._report_path = report_path
        self._next_look = time.monotonic() + LOOK_S
        self._next_question = 0.0
        self._question: _Question | None = None
        self._stragglers = Stragglers()

    @property
    def under_way(self) -> bool:
        """Whether all ranks of this node have ended a step, as of the last look."""
        return self._watch.under_way

    @property
    def deadline(self) -> float:
        """When to call `tick`."""
        return self._next_look

    def tick(self, now: float) -> HangFound | None:
        """Looks, if it is time to; what was found out, if anything was."""
        if now < self._next_look:
            return None
        self._next_look = now + LOOK_S
        sights = self._lookout.look()
        self._watch.note(sights, now)
        self._tell_of_stragglers({sight.rank: sight.words for sight in sights if sight.words is not None}, now)
        if self._question is not None:
            return self._conclude() if now >= self._question.ends else None
        if now >= self._next_question and find_hang(self._watch.standings()) is not None:
            self._next_question = now + _ASK_AGAIN_S
            self._line.publish(StandingsAsked(self._node))
        return None

    def handle(self, event: StandingsAsked | StandingsTold, now: float) -> HangFound | None:
        """Answers a question, or hears an answer; what was found out, if anything was."""
        if isinstance(event, StandingsAsked):
            if self._question is None:
                self._question = _Question(event.node, now + _ANSWER_S, {})
                self._line.publish(StandingsTold(self._node, to_text(self._tell(now))))
            return None
        if self._question is None:
            return None
        self._question.told[event.node] = from_text(event.standings)
        return self._conclude() if len(self._question.told) == self._num_nodes else None

    def _tell_of_stragglers(self, words: Mapping[int, Words], now: float) -> None:
        straggler = self._stragglers.note(words, now)
        if straggler is not None:
            get_logger().warning("%s", straggler)

    def _tell(self, now: float) -> list[Standing]:
        sights = self._lookout.look()
        self._watch.note(sights, now)
        quiet = {standing.rank for standing in self._watch.standings() if standing.silent_s >= _QUIET_S and not standing.stopped}
        stacks = self._lookout.stacks(sight for sight in sights if sight.rank in quiet)
        standings = {standing.rank: standing for standing in self._watch.standings(stacks)}
        return [replace(standings[sight.rank], debugged=self._lookout.is_debugged(sight, stacks.get(sight.rank, ""))) for sight in sights]

    def _conclude(self) -> HangFound | None:
        question, self._question = self._question, None
        if question is None or question.asker != self._node:
            return None
        standings = sorted((standing for told in question.told.values() for standing in told), key=lambda standing: standing.rank)
        hang = find_hang(standings)
        if hang is None:
            return None
        report = hang_report.summarize(hang, standings, str(self._report_path))
        return HangFound(hang.culprits[0].rank, report, hang_report.write_out(hang, standings))
