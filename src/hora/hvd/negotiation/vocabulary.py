"""Names that come again, told in one number: a steady state costs a few bytes an operation. Pure.

Rank 0 (`Dictionary`) numbers an operation when its name comes the second time, for names that are made up for one call never come again. A rank
(`Phrasebook`) uses the number as long as what it is ready for is what it was when it learnt the number. Numbers are never given twice, and one that
is taken back is understood until every rank has heard of it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hora.hvd.negotiation.request import Key, Request


class Phrasebook:
    """The numbers that one rank has learnt."""

    def __init__(self) -> None:
        self._numbers: dict[Key, tuple[int, Request]] = {}
        self._keys: dict[int, Key] = {}

    def number_of(self, request: Request) -> int | None:
        """The number that says just this; None where there is none."""
        known = self._numbers.get(request.key)
        return known[0] if known is not None and known[1] == request else None

    def key_of(self, number: int) -> Key:
        """What a number stands for."""
        return self._keys[number]

    def learn(self, number: int, request: Request) -> None:
        """`number` stands for `request` from now on."""
        self._numbers[request.key] = (number, request)
        self._keys[number] = request.key

    def forget(self, numbers: Iterable[int]) -> None:
        """The numbers stand for nothing any more."""
        for number in numbers:
            key = self._keys.pop(number, None)
            if key is not None and self._numbers[key][0] == number:
                del self._numbers[key]


class News(NamedTuple):
    """What the ranks are to learn and to forget."""

    learn: list[tuple[int, Key]]
    forget: list[int]


@dataclass
class _Retired:
    number: int
    unaware: dict[int, int]
    """Ranks that may still use it, and the number of the message that tells them."""


class Dictionary:
    """The numbers that rank 0 has given.

    Args:
        capacity: how many operations have numbers at most; 0: none ever has.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._said: dict[int, Mapping[int, Request]] = {}
        self._numbers: OrderedDict[Key, int] = OrderedDict()
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._retired: list[_Retired] = []
        self._count = 0
        self._learn: list[tuple[int, Key]] = []
        self._forget: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def look_up(self, number: int, rank: int) -> Request:
        """What `rank` says with `number`.

        Raises:
            KeyError: nothing.
        """
        return self._said[number][rank]

    def number(self, requests: Mapping[int, Request]) -> int | None:
        """The number that every rank knows for just these requests; None where there is none."""
        number = self._numbers.get(next(iter(requests.values())).key)
        return number if number is not None and self._said[number] == requests else None

    def is_in_use(self, number: int, key: Key) -> bool:
        """Whether `number` stands for `key`, and has not been taken back."""
        return self._numbers.get(key) == number

    def use(self, number: int, key: Key) -> None:
        """An operation has been agreed on with its number, which may have been taken back meanwhile."""
        if self.is_in_use(number, key):
            self._numbers.move_to_end(key)

    def note(self, requests: Mapping[int, Request]) -> None:
        """An operation has been agreed on, with `requests` of the ranks; it may get a number, and others may lose theirs."""
        key = next(iter(requests.values())).key
        number = self._numbers.get(key)
        if number is not None and self.number(requests) is not None:
            self._numbers.move_to_end(key)
            return
        if number is not None:
            self._take_back(key)
        elif key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > self._capacity:
                self._seen.popitem(last=False)
            return
        if self._capacity > 0:
            self._give(key, requests)

    def take_news(self) -> News:
        """What has changed since it was asked last."""
        news, self._learn, self._forget = News(self._learn, self._forget), [], []
        return news

    def told(self, forget: Iterable[int], serials: Mapping[int, int]) -> None:
        """Ranks were told to forget numbers, each in the message with the number `serials[rank]` to it."""
        self._retired += [_Retired(number, dict(serials)) for number in forget]

    def heard(self, rank: int, serial: int) -> None:
        """`rank` has read its messages up to `serial`, and uses no number that it was told there to forget."""
        for retired in self._retired:
            if retired.unaware.get(rank, serial + 1) <= serial:
                del retired.unaware[rank]
        for retired in self._retired:
            if not retired.unaware:
                del self._said[retired.number]
        self._retired = [retired for retired in self._retired if retired.unaware]

    def _give(self, key: Key, requests: Mapping[int, Request]) -> None:
        self._seen.pop(key, None)
        self._count += 1
        self._said[self._count], self._numbers[key] = dict(requests), self._count
        self._learn.append((self._count, key))
        while len(self._numbers) > self._capacity:
            self._take_back(next(iter(self._numbers)))

    def _take_back(self, key: Key) -> None:
        number = self._numbers.pop(key)
        self._learn = [(given, whose) for given, whose in self._learn if given != number]
        self._forget.append(number)
