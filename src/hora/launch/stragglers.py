"""Which rank of this node holds the others up in their steps, and whether with data or with computing. Pure.

Ranks leave a step together, so what a rank did not wait for others is what it took itself: that is compared, and no clocks of different ranks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from hora.pulse import Section, Words

FACTOR: Final = 2.0
"""A rank is slow that takes so many times as long as the median of the others."""

_WINDOW_S, _WINDOW_STEPS = 2.0, 4
_WINDOWS = 3
_LEAST_EXCESS_S = 0.002


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow. Times are those of a step, in seconds: its own, the others', and how much of the difference is waiting for data."""

    rank: int
    own_s: float
    others_s: float
    data_s: float

    def __str__(self) -> str:
        for_data = self.data_s > (self.own_s - self.others_s) / 2
        cause = "waiting for data" if for_data else "computing, or what it does between steps"
        return (
            f"rank {self.rank} is slow: {1e3 * self.own_s:.3g} ms a step of its own, where the others take {1e3 * self.others_s:.3g} ms and wait; "
            f"the difference is {cause} (--report tells more)"
        )


@dataclass(frozen=True)
class _Reading:
    now: float
    words: Words


class Stragglers:
    """Follows the steps of ranks. A rank that is slow for some windows of time in a row is told of once."""

    def __init__(self) -> None:
        self._begin: dict[int, _Reading] = {}
        self._suspect: int | None = None
        self._windows = 0
        self._told: set[int] = set()

    def note(self, words: Mapping[int, Words], now: float) -> Straggler | None:
        """Takes in what the ranks have said up to `now`; a rank that has shown to be slow, if one has."""
        readings = {
            rank: _Reading(now, said)
            for rank, said in words.items()
            if said.section in (Section.STEP, Section.EVALUATION) and not said.is_starting
        }
        if (
            len(readings) < 2
            or readings.keys() != self._begin.keys()
            or any(_went_back(self._begin[rank], readings[rank]) for rank in readings)
        ):
            self._begin = readings
            return None
        if any(not _is_window(self._begin[rank], reading) for rank, reading in readings.items()):
            return None
        begin, self._begin = self._begin, readings
        return self._judge(find_slowest({rank: _per_step(begin[rank], reading) for rank, reading in readings.items()}))

    def _judge(self, slowest: Straggler | None) -> Straggler | None:
        rank = None if slowest is None else slowest.rank
        self._windows = self._windows + 1 if rank == self._suspect else 1
        self._suspect = rank
        if slowest is None or self._windows < _WINDOWS or slowest.rank in self._told:
            return None
        self._told.add(slowest.rank)
        return slowest


def find_slowest(steps: Mapping[int, tuple[float, float]]) -> Straggler | None:
    """The rank that takes far longer than the others, if one does; `steps` are a rank's own time a step, and what of it was waiting for data."""
    rank = max(steps, key=lambda each: steps[each][0])
    own_s, data_s = steps[rank]
    others_s = _median(own for other, (own, _) in steps.items() if other != rank)
    others_data_s = _median(data for other, (_, data) in steps.items() if other != rank)
    if own_s < FACTOR * others_s or own_s - others_s < _LEAST_EXCESS_S:
        return None
    return Straggler(rank, own_s, others_s, data_s - others_data_s)


def _per_step(begin: _Reading, end: _Reading) -> tuple[float, float]:
    steps = end.words.steps - begin.words.steps
    own_s = end.now - begin.now - (end.words.waited_s - begin.words.waited_s)
    return max(0.0, own_s) / steps, (end.words.data_s - begin.words.data_s) / steps


def _median(values: Iterable[float]) -> float:
    """As `statistics.median`, which takes longer to load than the launcher takes to start two ranks."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _is_window(begin: _Reading, end: _Reading) -> bool:
    return end.now - begin.now >= _WINDOW_S and end.words.steps - begin.words.steps >= _WINDOW_STEPS


def _went_back(begin: _Reading, end: _Reading) -> bool:
    """Whether the rank has joined another job since."""
    return end.words.steps < begin.words.steps
