"""Finds out which hosts a job can run on, from one start to the next and while it runs: asks the user's command, and the hosts themselves.

All is done in the launcher's main thread, a little at a time. What is decided stands in `roster`.
"""

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from hora.errors import ConfigError
from hora.launch.asking import ANSWER_S, make_question
from hora.launch.dealing import count_slots
from hora.launch.discovery import Discovery
from hora.launch.guardian import Guardian
from hora.launch.hosts import Host
from hora.launch.inbox import Inbox
from hora.launch.options import LaunchOptions
from hora.launch.part import say
from hora.launch.probe import Probe
from hora.launch.remotes import dial
from hora.launch.roster import Roster, delay_s
from hora.launch.scout import Scout
from hora.log import get_logger

_BUSY_S, _IDLE_S = 0.05, 1.0
_REMIND_S = 3600.0
# Each takes a moment to be started, in which the ranks are not looked after.
_ASKED_AT_ONCE = 8


class HostScout(Scout):
    """For a job that can do without some of its hosts (`min_ranks`), or that also takes in others (`max_ranks`, `host_discovery`)."""

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._interval_s = options.discovery_interval_s
        self._discovery = Discovery(options.host_discovery) if options.host_discovery else None
        most = options.max_ranks or options.nproc
        self._roster = Roster(self._with_slots(options.hosts), options.fewest_ranks, most, self._interval_s if options.elastic else None)
        self._probes: dict[str, Probe] = {}
        self._guardian: Guardian | None = None
        self._discover_at = 0.0
        self._complaint = ""
        self._current: Mapping[str, int] = {}
        self._reason = ""
        self._asked, self._ask_at, self._remind_at = 0, 0.0, -math.inf

    @property
    def pids(self) -> Collection[int]:  # type: ignore[override]
        """The user's command, and remote shells to hosts that are asked."""
        return [*([] if self._discovery is None else self._discovery.pids), *(probe.pid for probe in self._probes.values())]

    @property
    def deadline(self) -> float | None:  # type: ignore[override]
        """Soon while something is under way; never where no host can come."""
        if not self._options.elastic:
            return None
        return time.monotonic() + (_BUSY_S if self.pids else min(_IDLE_S, self._interval_s))

    def may_miss(self, generation: int) -> bool:
        """From the first start on only where hosts may come later."""
        return generation > 0 or self._options.elastic

    def muster(self, options: LaunchOptions, lost: Collection[int] = ()) -> LaunchOptions | None:
        """See `Scout`; where hosts may come, waits for as many as must be, as long as nodes may take to join."""
        for name in [options.hosts[node].name for node in lost]:
            self._roster.lose(name, time.monotonic())
        if not lost and not self._options.elastic:
            return options
        if self._options.elastic:
            with Inbox() as inbox:
                self._ask_command(inbox, first=not options.hosts)
                self._await_enough(inbox)
        hosts = self._roster.choose()
        self._current = {host.name: host.slots or 1 for host in hosts}
        self._reason, self._asked, self._ask_at = "", 0, time.monotonic() + self._interval_s
        return replace(options, hosts=hosts, nproc=sum(self._current.values()), nproc_per_node=None) if hosts else None

    def guard(self, guardian: Guardian | None) -> None:
        """Puts what there is under guard."""
        self._guardian = guardian
        if guardian is not None:
            for pid in self.pids:
                guardian.add(pid)

    def tend(self, now: float) -> bool:
        """See `Scout`. What has just come is not taken in while others may be about to answer: each time costs the job a start."""
        if not self._options.elastic:
            return False
        self._look(now)
        awaited = any(now - probe.began < self._interval_s for probe in self._probes.values())
        if awaited or now < self._ask_at or not (reason := self._roster.reason(self._current)):
            return False
        self._tell(reason, now)
        self._asked += 1
        self._ask_at = now + delay_s(self._interval_s, self._asked + 1)
        return True

    def close(self) -> None:
        """Ends what is under way."""
        for probe in self._probes.values():
            probe.end()
        self._probes.clear()
        if self._discovery is not None:
            self._discovery.stop()

    def _tell(self, reason: str, now: float) -> None:
        if reason != self._reason:
            ranks = sum(host.slots or 1 for host in self._roster.choose())
            say(f"{reason}: the ranks are asked to save and to end (SIGUSR1), to go on as {ranks}")
        elif now >= self._remind_at:  # once for all generations, for what it says of the script remains so
            self._remind_at = now + _REMIND_S
            say(
                "the ranks have not ended yet; a script lets hosts come and go if it catches SIGUSR1, saves and ends with exit code 75 (see "
                "`Preemption` in docs/runs.md)"
            )
        self._reason = reason

    # Looking around.

    def _look(self, now: float) -> None:
        """Goes on with what is under way, and begins what is due."""
        if self._discovery is not None:
            self._tend_discovery(self._discovery, now)
        for name, probe in list(self._probes.items()):
            self._tend_probe(name, probe, now)
        for name in self._roster.due(now):
            if name not in self._probes and len(self._probes) < _ASKED_AT_ONCE:
                self._begin_probe(name)

    def _tend_discovery(self, discovery: Discovery, now: float) -> None:
        running = tuple(discovery.pids)
        try:
            if running and (hosts := discovery.poll(now)) is not None:
                self._roster.relist(self._with_slots(hosts), due=now)
                self._complaint = ""
            elif not running and now >= self._discover_at:
                self._discover_at = now + self._interval_s
                discovery.begin(now)
        except ConfigError as error:
            self._complain(str(error))
        if discovery.pids != running:
            self._unguard(*running)
            self._guard_those(discovery.pids)

    def _complain(self, problem: str) -> None:
        """Once, and not each time that the command is asked."""
        if problem != self._complaint:
            get_logger().warning("%s; the hosts that it named before are kept", problem)
        self._complaint = problem

    def _begin_probe(self, name: str) -> None:
        question = make_question(self._options, None) | {"first": False}
        try:
            probe = Probe(dial(self._options, name), question, min(ANSWER_S, self._options.join_timeout_s))
        except (ConfigError, OSError) as error:
            get_logger().debug("%s is not asked: %s", name, error)
            self._roster.lose(name, time.monotonic())
            return
        self._probes[name] = probe
        self._guard_those([probe.pid])

    def _tend_probe(self, name: str, probe: Probe, now: float) -> None:
        probe.tend(now)
        if not probe.gone:
            return
        del self._probes[name]
        self._unguard(probe.pid)
        if probe.problem:
            get_logger().debug("%s", probe.problem)
            self._roster.lose(name, now)
        else:
            self._roster.welcome(name)

    def _guard_those(self, pids: Collection[int]) -> None:
        if self._guardian is not None:
            for pid in pids:
                self._guardian.add(pid)

    def _unguard(self, *pids: int) -> None:
        if self._guardian is not None:
            for pid in pids:
                self._guardian.discard(pid)

    # Between two generations, when there is time.

    def _ask_command(self, inbox: Inbox, *, first: bool) -> None:
        """Asks the user's command and waits for its answer, which must be one at the first start."""
        if self._discovery is None:
            return
        try:
            if not self._discovery.pids:
                self._discovery.begin(time.monotonic())
            while (hosts := self._discovery.poll(time.monotonic())) is None:
                inbox.wait(_BUSY_S)
            self._roster.relist(self._with_slots(hosts), due=None)
        except ConfigError as error:
            if first:
                raise
            self._complain(str(error))
        self._discover_at = time.monotonic() + self._interval_s

    def _await_enough(self, inbox: Inbox) -> None:
        options = self._options
        if self._roster.choose():
            return
        say(f"there are hosts for fewer than --min-ranks {options.fewest_ranks}: waits up to {options.join_timeout_s:g} s for others")
        end = time.monotonic() + options.join_timeout_s
        while not self._roster.choose() and time.monotonic() < end:
            with inbox.deferring():
                self._look(time.monotonic())
            inbox.wait(_BUSY_S)

    def _with_slots(self, hosts: Collection[Host]) -> list[Host]:
        """The hosts with their slots.

        Raises:
            ConfigError: one has fewer than `--nproc-per-node` says.
        """
        told = replace(self._options, hosts=tuple(hosts)) if self._discovery is None else self._options
        return [Host(host.name, count_slots(told, host)) for host in hosts]
