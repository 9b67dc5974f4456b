"""How long ranks may make no progress before the job counts as hanging: what the user said, else what the run has shown. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from hora.env import LONGEST_S
from hora.errors import ConfigError
from hora.pulse import Doing, Section, Words

STOPPED: Final = "stopped"
"""Beside the sections: how long a rank's process may be stopped, by SIGSTOP for instance."""

SECTIONS: Final = {"start": Section.START, "step": Section.STEP, "checkpoint": Section.CHECKPOINT, "evaluation": Section.EVALUATION}

_STOPPED_S = 2.0
_LEAST_S = {Section.START: 1800.0, Section.STEP: 180.0, Section.CHECKPOINT: 600.0}
_LEAST_AWAITED_S, _AWAITED_SHARE = 240.0, 0.8
_TIMES_LONGEST, _TIMES_START = 10.0, 3.0


@dataclass(frozen=True)
class Deadlines:
    """Deadlines of sections, and of being stopped, in seconds, by name; those that are not `given` are learnt. Infinite: none."""

    given: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> "Deadlines":
        """Reads `step=60,checkpoint=off`, or `off` for none at all.

        Raises:
            ConfigError: it reads otherwise; all that is wrong is named.
        """
        names = [*SECTIONS, STOPPED]
        if text == "off":
            return cls(dict.fromkeys(names, math.inf))
        given, problems = {}, []
        for part in text.split(","):
            name, _, value = part.partition("=")
            seconds = _seconds(value)
            if name not in names:
                problems.append(f"{name!r} is none of {', '.join(names)}")
            elif seconds is None:
                problems.append(f"{name} must be a number of seconds above 0 ({LONGEST_S:.0e} at most), or off, but is {value!r} instead")
            else:
                given[name] = seconds
        if problems:
            raise ConfigError(f"--deadline must read step=60,checkpoint=off, or off for none, but in {text!r} {'; '.join(problems)}")
        return cls(given)

    @property
    def stopped_s(self) -> float:
        """How long a process may be stopped."""
        return self.given.get(STOPPED, _STOPPED_S)

    def given_for(self, section: Section) -> float | None:
        """What the user said of a section; None: nothing."""
        return next((self.given[name] for name, known in SECTIONS.items() if known is section and name in self.given), None)

    def given_to(self, words: Words) -> float | None:
        """What the user said of where a rank is that last said `words`: of its section, else of the start while it is starting; None: nothing."""
        given = self.given_for(words.section)
        return self.given_for(Section.START) if given is None and words.is_starting else given

    def limit_s(self, words: Words, longest_s: Mapping[Section, float]) -> float:
        """How long others may have to wait for a rank that last said `words`.

        Args:
            words: of the rank.
            longest_s: the longest that a rank of this run was silent inside of each section, and then went on.
        """
        given = self.given_to(words)
        if given is not None:
            return given
        if words.section is Section.OUTSIDE:
            return math.inf
        # A little less than what their collectives allow, so that it is told with the stacks.
        awaited_s = max(_LEAST_AWAITED_S, _AWAITED_SHARE * words.timeout_s)
        if words.doing in (Doing.OWN, Doing.DATA):
            return awaited_s
        section = Section.START if words.is_starting else words.section
        learnt_s = max(_LEAST_S.get(section, awaited_s), _TIMES_LONGEST * longest_s.get(section, 0.0))
        # What was compiled at the start is compiled once more for the last batch of an epoch, which is smaller.
        learnt_s = max(learnt_s, _TIMES_START * longest_s.get(Section.START, 0.0))
        return learnt_s if words.doing in (Doing.WORK, Doing.DEVICE) else min(learnt_s, awaited_s)


def _seconds(text: str) -> float | None:
    if text == "off":
        return math.inf
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds <= LONGEST_S else None
