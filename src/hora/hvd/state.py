"""What `init` makes and `shutdown` ends: the engine in its session, the process sets, and the operations under way by handle."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from hora.comm.session import Session
from hora.comm.subgroups import Subgroup, new_group
from hora.errors import ConfigError
from hora.hvd.engine.engine import Engine
from hora.hvd.engine.entry import Entry
from hora.hvd.negotiation.request import Kind, Request

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."

_groups: dict[Session, dict[tuple[int, ...], Subgroup]] = {}
"""Groups last as long as their session, which may see several `init`."""
_handles = itertools.count()


@dataclass(eq=False)
class State:
    """One life between `init` and `shutdown`.

    Attributes:
        session: the job.
        engine: carries out operations.
        owns_session: whether `shutdown` ends the session too.
        dynamic: whether process sets may come and go.
        sets: the process sets by number.
        handles: operations whose result has not been taken.
    """

    session: Session
    engine: Engine
    owns_session: bool
    dynamic: bool
    sets: dict[int, Any] = field(default_factory=dict)
    handles: dict[int, tuple[Entry, Any]] = field(default_factory=dict)
    _set_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _nameless: Counter[tuple[Kind, int]] = field(default_factory=Counter)

    def next_handle(self) -> int:
        """A number for an operation, which no other has had, in an earlier life included."""
        return next(_handles)

    def next_set_id(self) -> int:
        """A number for a process set; the same on all ranks, which make them in one order."""
        return next(self._set_ids)

    def name_for(self, kind: Kind, name: str | None, set_id: int) -> str:
        """The name by which ranks meet; those without one meet by how many they were in their process set."""
        word = kind.lower()
        if name is not None:
            return f"{word}.{name}"
        self._nameless[kind, set_id] += 1
        return f"{word}.noname.{self._nameless[kind, set_id]}"

    def restart_names(self) -> None:
        """Ranks that have come together again after one had made fewer calls count those without names anew."""
        for kind, set_id in list(self._nameless):
            if set_id == 0:
                del self._nameless[kind, set_id]

    def group_of(self, ranks: tuple[int, ...]) -> Subgroup:
        """The group in which the engine talks to `ranks`. Collective."""
        if self.session not in _groups:
            self.session.release.callback(_groups.pop, self.session)
        known = _groups.setdefault(self.session, {})
        if ranks not in known:
            # The ranks have agreed on each operation before: no roll is called.
            known[ranks] = replace(new_group(ranks), check_calls=False)
        return known[ranks]

    def barrier(self, set_id: int = 0) -> None:
        """Returns when all ranks of a process set have come. Collective."""
        entry = Entry(Request(Kind.BARRIER, self.name_for(Kind.BARRIER, None, set_id), set_id))
        self.engine.give(entry)
        self.engine.wait(entry)


_state: State | None = None


def current() -> State:
    """What is in force.

    Raises:
        ValueError: `init` was not called, or `shutdown` was.
    """
    if _state is None:
        raise ConfigError(NOT_INITIALIZED)
    return _state


def is_running() -> bool:
    """Whether `current` gives something."""
    return _state is not None


def begin(state: State) -> None:
    """Puts `state` in force."""
    global _state
    _state = state


def end() -> State | None:
    """Nothing is in force any more; what was."""
    global _state
    ended, _state = _state, None
    return ended
