"""The keys and values of a rendezvous and those who wait for them: pure, without sockets, threads or clocks.

`Table.apply` carries out one request and says what to answer now, or hands out a `Waiter` whose answer will come later: from another
request that sets the last missing key, or from `expire`. Operations mean what they mean in PyTorch's TCPStore (counters are decimal
text; `compare_set` on an absent key returns what was expected).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hora.rendezvous.protocol import packed_bytes

OK, MISSING, REFUSED = b"ok", b"missing", b"refused"

Answer = list[bytes]


@dataclass(eq=False)
class Waiter:
    """A request that waits for keys; `answer` holds what to reply once it is known."""

    keys: Sequence[bytes]
    with_values: bool
    deadline: float
    missing: set[bytes] = field(default_factory=set)
    answer: Answer | None = None


class Refused(Exception):
    """A request that cannot be carried out; its text goes back to the client, and nothing has changed."""


class Table:
    """Values by key. Times are seconds on a clock of the caller's that never goes back.

    Args:
        max_answer_bytes: an answer carries as many values as fit into this many bytes, but at least one; a value that would not fit alone
            is refused when it is written.
        notify: is called with each waiter whose answer has become known outside its own `apply`.
    """

    def __init__(self, *, max_answer_bytes: int, notify: Callable[[Waiter], None]) -> None:
        self._max_answer_bytes = max_answer_bytes
        self._notify = notify
        self._values: dict[bytes, bytes] = {}
        self._waiters: dict[bytes, set[Waiter]] = {}
        self._waiting: set[Waiter] = set()
        self._operations: dict[bytes, Callable[..., Answer]] = {
            b"set": self.set,
            b"multi_set": self._multi_set,
            b"add": self._add,
            b"append": self._append,
            b"compare_set": self._compare_set,
            b"delete": self._delete,
            b"check": self._check,
            b"num_keys": self._num_keys,
            b"keys": self._keys,
        }

    def apply(self, request: Sequence[bytes], now: float) -> Answer | Waiter:
        """Carries out `request`, a name followed by its arguments."""
        name, *arguments = request or (b"",)
        try:
            if name in (b"get", b"wait"):
                timeout_s, *keys = arguments
                return self._await(keys, float(timeout_s), now, with_values=name == b"get")
            return [OK, *self._operations[name](*arguments)]
        except Refused as refusal:
            return [REFUSED, str(refusal).encode()]
        except (KeyError, TypeError, ValueError):
            return [REFUSED, b"no such request: " + name[:64]]

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next; None if nobody waits."""
        return min((waiter.deadline for waiter in self._waiting), default=None)

    def expire(self, now: float) -> None:
        """Answers each waiter whose deadline has come with the keys that are missing."""
        late = [waiter for waiter in self._waiting if waiter.deadline <= now]
        for waiter in late:
            self.forget(waiter)
            waiter.answer = [MISSING, *dict.fromkeys(key for key in waiter.keys if key not in self._values)]
        for waiter in late:
            self._notify(waiter)

    def forget(self, waiter: Waiter) -> None:
        """Drops a waiter; it gets no answer any more."""
        self._waiting.discard(waiter)
        for key in waiter.missing:
            self._waiters[key].discard(waiter)
            if not self._waiters[key]:
                del self._waiters[key]
        waiter.missing.clear()

    def set(self, key: bytes, value: bytes) -> Answer:
        """Sets `key` and answers those for whom it was the last one missing."""
        if packed_bytes(OK) + packed_bytes(value) > self._max_answer_bytes:
            raise Refused(f"the value of {_shown(key)} must fit into one message, but has {len(value)} bytes")
        self._values[key] = value
        ready = [waiter for waiter in self._waiters.pop(key, set()) if self._came(waiter, key)]
        for waiter in ready:
            self._notify(waiter)
        return []

    def _multi_set(self, *pairs: bytes) -> Answer:
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            self.set(key, value)
        return []

    def _add(self, key: bytes, amount: bytes) -> Answer:
        before = self._values.get(key, b"0")
        try:
            total = b"%d" % (int(before) + int(amount))
        except ValueError:
            raise Refused(f"{_shown(key)} must hold a whole number, but holds something else") from None
        self.set(key, total)
        return [total]

    def _append(self, key: bytes, value: bytes) -> Answer:
        return self.set(key, self._values.get(key, b"") + value)

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> Answer:
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self.set(key, desired)
            return [desired]
        return [expected if current is None else current]

    def _delete(self, key: bytes) -> Answer:
        return [b"1" if self._values.pop(key, None) is not None else b"0"]

    def _check(self, *keys: bytes) -> Answer:
        return [b"1" if all(key in self._values for key in keys) else b"0"]

    def _num_keys(self) -> Answer:
        return [b"%d" % len(self._values)]

    def _keys(self, prefix: bytes, after: bytes) -> Answer:
        found = sorted(key for key in self._values if key.startswith(prefix) and key > after)
        return self._as_many_as_fit(found)

    def _await(self, keys: Sequence[bytes], timeout_s: float, now: float, *, with_values: bool) -> Answer | Waiter:
        if not math.isfinite(timeout_s):
            raise Refused(f"a timeout must be finite, but is {timeout_s}")
        waiter = Waiter(keys, with_values, now + timeout_s)
        self._settle(waiter)
        return waiter if waiter.answer is None else waiter.answer

    def _came(self, waiter: Waiter, key: bytes) -> bool:
        waiter.missing.discard(key)
        return not waiter.missing and self._settle(waiter)

    def _settle(self, waiter: Waiter) -> bool:
        """Answers `waiter` if all its keys are there, else lists it under those that are not (one may have been deleted meanwhile)."""
        waiter.missing = {key for key in waiter.keys if key not in self._values}
        for key in waiter.missing:
            self._waiters.setdefault(key, set()).add(waiter)
        if waiter.missing:
            self._waiting.add(waiter)
            return False
        self._waiting.discard(waiter)
        waiter.answer = [OK, *self._as_many_as_fit([self._values[key] for key in waiter.keys])] if waiter.with_values else [OK]
        return True

    def _as_many_as_fit(self, fields: Sequence[bytes]) -> Answer:
        room = self._max_answer_bytes - packed_bytes(OK)
        sizes = itertools.accumulate(packed_bytes(one) for one in fields)
        return [one for one, size in zip(fields, sizes, strict=True) if size <= room]


def _shown(key: bytes) -> str:
    return repr(key[:200].decode(errors="replace"))
