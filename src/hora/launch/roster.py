"""The hosts that a job may run on, as far as is known, and which of them it runs on next. Pure: times are seconds on a clock of the caller's."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hora.launch.hosts import Host, deal

_LONGEST = 60
"""How much longer than at first the wait for a host that is lost again and again grows."""


def delay_s(first_s: float, times: int) -> float:
    """How long to wait before another try after `times`: twice as long each time, up to a limit."""
    return first_s * min(_LONGEST, 1 << min(max(0, times - 1), 30))


@dataclass
class _Doubt:
    """A host that was lost or could not be used so many times; at `due` it may be asked again, None: it has answered since."""

    times: int
    due: float | None


class Roster:
    """The hosts that are listed, each with its slots, and what was seen of them.

    Args:
        fewest: with how many ranks the job can run.
        most: how many ranks it is to have; None: as many as there are slots.
        again_after_s: how long a host that is lost is not asked again, the first time; None: it is left out for good.
    """

    def __init__(self, hosts: Iterable[Host], fewest: int, most: int | None, again_after_s: float | None) -> None:
        self._listed = {host.name: host.slots or 1 for host in hosts}
        self._fewest = fewest
        self._most = most
        self._again_after_s = again_after_s
        self._doubts: dict[str, _Doubt] = {}

    def relist(self, hosts: Sequence[Host], due: float | None) -> None:
        """These are the hosts from now on. New ones are to be asked at `due` before they are used; None: they may be used."""
        for name in {host.name for host in hosts} - self._listed.keys() - self._doubts.keys():
            self._doubts[name] = _Doubt(0, due)
        self._listed = {host.name: host.slots or 1 for host in hosts}

    def lose(self, name: str, now: float) -> None:
        """A host is lost, or cannot be used."""
        doubt = self._doubts.setdefault(name, _Doubt(0, None))
        doubt.times += 1
        doubt.due = float("inf") if self._again_after_s is None else now + delay_s(self._again_after_s, doubt.times)

    def welcome(self, name: str) -> None:
        """A host has answered and can be used. That it was lost is not forgotten: one that comes and goes is asked less and less often."""
        if name in self._doubts:
            self._doubts[name].due = None

    def due(self, now: float) -> list[str]:
        """The hosts that are to be asked whether they can be used."""
        return [name for name in self._listed if (due := self._doubted(name)) is not None and due <= now]

    def choose(self) -> tuple[Host, ...]:
        """The hosts to run on, each with its ranks, in the order in which they are listed; none if there are fewer ranks than must be."""
        usable = {name: slots for name, slots in self._listed.items() if self._doubted(name) is None}
        slots = sum(usable.values())
        ranks = slots if self._most is None else min(slots, self._most)
        if ranks < self._fewest:
            return ()
        return tuple(Host(name, count) for name, count in zip(usable, deal(list(usable.values()), ranks), strict=True) if count)

    def reason(self, current: Mapping[str, int]) -> str:
        """Why a job that runs so many ranks on each host is to go on with those of `choose` instead; empty if it is not."""
        chosen = {host.name: host.slots or 1 for host in self.choose()}
        if not chosen:
            return ""
        if leaving := [name for name, ranks in current.items() if ranks > self._listed.get(name, 0)]:
            return f"{' and '.join(leaving)} {'is' if len(leaving) == 1 else 'are'} listed no more, or with fewer slots"
        if sum(chosen.values()) > sum(current.values()):
            coming = [name for name, ranks in chosen.items() if ranks > current.get(name, 0)]
            return f"{' and '.join(coming)} can be used"
        return ""

    def _doubted(self, name: str) -> float | None:
        doubt = self._doubts.get(name)
        return None if doubt is None else doubt.due
