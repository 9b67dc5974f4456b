"""The hosts of a job: what `-H` and `--hostfile` say, and how many ranks each gets. Pure, save for reading the file."""

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hora.errors import ConfigError

# Nothing that a shell or ssh could take for anything but a name; ssh's `user@host` is one.
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
_BRACKETS = re.compile(r"((?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?)\[([^\]]*)\](?::(.*))?", re.DOTALL)
MAX_SLOTS = 4096
"""More than any host runs, and as many as the rendezvous of a job serves: a larger number is a mistake."""

_SHOWN = 80

_IGNORED_WORDS = re.compile(r"max[_-]slots=\d+")


@dataclass(frozen=True)
class Host:
    """A host by the name that the user gave it, and its slots; None: it was not said how many."""

    name: str
    slots: int | None = None

    @property
    def address(self) -> str:
        """The name without ssh's `user@`."""
        return self.name.rpartition("@")[2]


def read_hosts(text: str) -> tuple[Host, ...]:
    """What `-H host:slots,host` says. A host that is named twice has the slots of both.

    Raises:
        ConfigError: names each word that is no host.
    """
    return _collect([(word, "-H") for word in text.split(",")], f"-H {text!r}")


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """What a file in Open MPI's format says: lines `host slots=4` or `host:4`, `#` before remarks.

    Raises:
        ConfigError: the file cannot be read, names no host, or has lines that are none; each is named.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the host file {path} cannot be read: {getattr(error, 'strerror', None) or error}; check the name") from error
    return read_lines(lines, str(path), f"the host file {path}")


def read_lines(lines: Iterable[str], place: str, where: str, *, distinct: bool = False) -> tuple[Host, ...]:
    """What the lines of a host file say; `place` stands before their numbers and `where` names the whole, for people.

    Args:
        lines: as in `read_hostfile`.
        place: what has the lines.
        where: the whole.
        distinct: a host that is named twice is one host, whose slots must be the same; else it has the slots of both.

    Raises:
        ConfigError: they name no host, or some are none; each is named.
    """
    said = [(line.partition("#")[0].strip(), f"{place}:{number}") for number, line in enumerate(lines, start=1)]
    return _collect([(line, place) for line, place in said if line], where, distinct=distinct)


def deal(slots: Sequence[int], nproc: int | None) -> tuple[int, ...]:
    """How many ranks each host gets: all its slots, host by host until there are `nproc`.

    Raises:
        ConfigError: there are fewer slots.
    """
    if nproc is None:
        return tuple(slots)
    if nproc > sum(slots):
        raise ConfigError(
            f"-np {nproc} is more than the {sum(slots)} slots of the hosts; give them more slots (host:N), or start fewer ranks"
        )
    dealt, left = [], nproc
    for there in slots:
        dealt.append(min(there, left))
        left -= dealt[-1]
    return tuple(dealt)


def _collect(words: Iterable[tuple[str, str]], where: str, *, distinct: bool = False) -> tuple[Host, ...]:
    found: dict[str, int | None] = {}
    problems = []
    for word, place in words:
        try:
            host = _read_line(word)
            found[host.name] = _slots_of_both(found, host, distinct=distinct) if host.name in found else host.slots
        except ValueError as error:
            problems.append(f"{place}: {error}")
    if problems:
        raise ConfigError("; ".join(problems))
    if not found:
        raise ConfigError(f"{where} names no host; give at least one")
    return tuple(Host(name, slots) for name, slots in found.items())


def _slots_of_both(found: dict[str, int | None], host: Host, *, distinct: bool) -> int | None:
    """The slots of a host that has been named before."""
    before, now = (slots if slots is not None else 1 for slots in (found[host.name], host.slots))
    if not distinct:
        return before + now
    if before != now:
        raise ValueError(f"{host.name} is named a second time, with another number of slots ({now}, before {before}); name it once")
    return host.slots


def _read_line(line: str) -> Host:
    word, *options = line.split() or [""]
    slots = None
    for option in options:
        if option.startswith("slots="):
            slots = _read_slots(option.removeprefix("slots="), line)
        elif not _IGNORED_WORDS.fullmatch(option):
            raise ValueError(f"a host must read host:slots or host slots=N, but is {line!r} instead")
    host = _read_word(word, line)
    if slots is not None and host.slots is not None:
        raise ValueError(f"{line!r} says twice how many slots there are; say it once")
    return Host(host.name, host.slots if slots is None else slots)


def _read_word(word: str, line: str) -> Host:
    if bracketed := _BRACKETS.fullmatch(word):
        user, name, slots = bracketed.groups()
        _require_ipv6(name, line)
        return Host(user + name, None if slots is None else _read_slots(slots, line))
    if word.count(":") > 1:
        raise ValueError(f"an IPv6 address must stand in brackets, [address]:slots, but {line!r} has none")
    name, colon, slots = word.partition(":")
    if not _NAME.fullmatch(name):
        raise ValueError(f"a host must be a name or an address, but is {line!r} instead")
    return Host(name, _read_slots(slots, line) if colon else None)


def _read_slots(text: str, line: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_SLOTS:
        raise ValueError(f"slots must be a number from 1 to {MAX_SLOTS}, but {line[:_SHOWN]!r} has {text[:_SHOWN]!r}")
    return int(text)


def _require_ipv6(text: str, line: str) -> None:
    address, _, scope = text.partition("%")
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        parsed = None
    if parsed is None or ("%" in text and not re.fullmatch(r"[A-Za-z0-9_.-]+", scope)):
        raise ValueError(f"in brackets there must be an IPv6 address, but {line!r} has {text!r}")
    if parsed.is_link_local and not scope:
        raise ValueError(f"{address} is an address of one link and needs its interface: write [{address}%eth0], or another address")
