"""How long the ranks of this node have made no progress, from looks at them. Pure: times are the caller's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hora.launch.deadlines import Deadlines
from hora.launch.standing import Standing
from hora.pulse import Doing, Missing, Section, Words

LOOK_S: Final = 0.5
"""How often to look."""

_STOPPED_STATE = "T"
_NOTHING_SAID = Words(0, Section.OUTSIDE, Doing.OWN, 0, 0, 0, 0, "", 0.0, 0.0, 0, 0.0)


@dataclass(frozen=True)
class Sight:
    """What was seen of a rank: its process, the letter of its state, what it has said."""

    rank: int
    pid: int
    state: str
    words: Words | None


@dataclass
class _Silence:
    words: Words
    since_s: float
    stopped_since_s: float | None = None


class Watch:
    """Follows the ranks of the node called `host`.

    Its clock runs while somebody looks: when the launcher itself is stopped, or gets no turn, time does not pass for the ranks.
    """

    def __init__(self, deadlines: Deadlines, host: str) -> None:
        self._deadlines = deadlines
        self._host = host
        self._clock_s = 0.0
        self._looked: float | None = None
        self._silences: dict[int, _Silence] = {}
        self._sights: Sequence[Sight] = ()
        self._longest_s: dict[Section, float] = {}

    def note(self, sights: Sequence[Sight], now: float) -> None:
        """Takes in a look at all ranks that live."""
        if self._looked is not None:
            self._clock_s += min(now - self._looked, 2 * LOOK_S)
        self._looked, self._sights = now, sights
        for sight in sights:
            self._note(sight)

    def standings(self, stacks: Mapping[int, str] = {}) -> list[Standing]:
        """Where the ranks stand, as of the last look; `stacks` of their threads, by rank, go with them."""
        return [replace(self._standing(sight), stacks=stacks.get(sight.rank, "")) for sight in self._sights]

    @property
    def under_way(self) -> bool:
        """Whether all ranks of this node have ended a step, as of the last look."""
        return bool(self._sights) and all(sight.words is not None and sight.words.steps > 0 for sight in self._sights)

    def _note(self, sight: Sight) -> None:
        words = self._words(sight)
        silence = self._silences.setdefault(sight.rank, _Silence(words, self._clock_s))
        if silence.words.count != words.count:
            self._learn(silence)
            silence.since_s = self._clock_s
        silence.words = words  # also where all that has changed is what it knows of others
        if sight.state != _STOPPED_STATE:
            silence.stopped_since_s = None
        elif silence.stopped_since_s is None:
            silence.stopped_since_s = self._clock_s

    def _words(self, sight: Sight) -> Words:
        """What it said last. A rank that has said nothing is watched only if it was given a deadline for its start."""
        if sight.words is not None:
            return sight.words
        given = self._deadlines.given_for(Section.START) is not None
        return replace(_NOTHING_SAID, section=Section.START) if given else _NOTHING_SAID

    def _learn(self, silence: _Silence) -> None:
        if silence.words.doing in (Doing.WORK, Doing.DEVICE):
            section = Section.START if silence.words.is_starting else silence.words.section
            took_s = self._clock_s - silence.since_s
            self._longest_s[section] = max(took_s, self._longest_s.get(section, 0.0))

    def _standing(self, sight: Sight) -> Standing:
        silence = self._silences[sight.rank]
        words, stopped_since_s = silence.words, silence.stopped_since_s
        number = f" #{words.call}" if words.kind and words.call else ""
        missing = Missing.from_json(words.note)
        return Standing(
            rank=sight.rank,
            host=self._host,
            pid=sight.pid,
            state=sight.state,
            section=words.section,
            doing=words.doing,
            steps=words.steps,
            begun=words.begun,
            finished=words.finished,
            call=f"{words.kind}{number}",
            silent_s=self._clock_s - silence.since_s,
            stopped_s=0.0 if stopped_since_s is None else self._clock_s - stopped_since_s,
            limit_s=self._deadlines.limit_s(words, self._longest_s),
            given=self._deadlines.given_to(words) is not None,
            stopped_limit_s=self._deadlines.stopped_s,
            missing=missing.ranks,
            note=missing.text,
        )
