"""A page of memory in which a rank says how far it is, and which its launcher reads.

The page is a file in the job's private directory that the rank has mapped: a word costs less than a microsecond, and the launcher reads it
whatever the rank is doing, also when it holds the interpreter's lock for ever. Beside it lies a file into which the rank's Python stacks are
written when the launcher sends `ASK`, by a handler in C that needs no lock. Without Hora's launcher the page is memory of the rank's own, and
nobody reads it. Relies on the standard library alone, decides nothing.
"""

import faulthandler
import json
import mmap
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from time import perf_counter_ns
from typing import Final

from hora import env

ASK: Final = getattr(signal, "SIGURG", None)
"""What asks a rank for its stacks: a process that does not know the signal ignores it. None where there is no such signal."""

START_STEPS: Final = 10
"""So many steps are given the time of the start: compilers, captures and caches have their turn in them."""

_VERSION = 1
_PAGE_BYTES = mmap.PAGESIZE
_KIND_BYTES = 24
# Numbers of 8 bytes, by their place in the page; each is written at once.
_COUNT, _PLACE, _STEPS, _BEGUN, _FINISHED, _CALL, _KIND = range(7)
_KIND_PLACE, _NO_KIND = slice(8 * _KIND, 8 * _KIND + _KIND_BYTES), bytes(_KIND_BYTES)
_WAITED_NS, _DATA_NS, _PID, _TIMEOUT_MS, _PAGE_VERSION = range(_KIND + _KIND_BYTES // 8, _KIND + _KIND_BYTES // 8 + 5)
_NS = 1e9
# A text of some lines, and before it how long it is.
_NOTE, _NOTE_TEXT, _NOTE_BYTES = _PAGE_VERSION + 1, 8 * (_PAGE_VERSION + 2), 2048
_MOST_MISSING, _MOST_TEXT_BYTES = 64, 768


class Section(IntEnum):
    """What part of a run a rank is in."""

    OUTSIDE = 0
    """In no job: before `hora.init`, after `hora.shutdown`."""
    START = 1
    """From `hora.init` until the first step has ended."""
    STEP = 2
    CHECKPOINT = 3
    EVALUATION = 4
    """Between two steps: evaluation, logging, waiting for the next batch."""


class Doing(IntEnum):
    """What a rank is doing there."""

    OWN = 0
    """Code of the script, outside of anything of Hora's."""
    DATA = 1
    """It waits for samples, and so for code of the script."""
    WORK = 2
    """It computes, inside a step or a checkpoint."""
    CALL = 3
    """It waits in a collective or message."""
    WAIT = 4
    """It waits for the word or the sums of other ranks, inside a step."""
    DEVICE = 5
    """It waits for its device."""


# By names of the module: to look a member up in its class takes longer than the rest of a word (Python 3.11).
_STEP, _EVALUATION = Section.STEP, Section.EVALUATION
_OWN, _DATA, _WORK, _CALLING, _WAIT = Doing.OWN, Doing.DATA, Doing.WORK, Doing.CALL, Doing.WAIT


@dataclass(frozen=True)
class Words:
    """What stands in a page.

    Attributes:
        count: of words said; it grows as long as the rank gets on.
        steps: that have ended.
        begun: collectives of all ranks that this one has begun.
        finished: those that it has finished.
        call: number of the collective that it is in, 0 for one that not all ranks make; `kind` is what it is, empty if it is in none.
        waited_s: how long it has waited for other ranks in all its steps so far.
        data_s: how long it has waited for samples.
        pid: process of the rank.
        timeout_s: deadline of its collectives.
        note: what it knows of ranks that others wait for (`Missing`), as JSON; empty: nothing.
    """

    count: int
    section: Section
    doing: Doing
    steps: int
    begun: int
    finished: int
    call: int
    kind: str
    waited_s: float
    data_s: float
    pid: int
    timeout_s: float
    note: str = ""

    @property
    def is_starting(self) -> bool:
        """Whether the rank is in its start, or in or between the steps that are given its time."""
        return self.section is Section.START or (self.section in (Section.STEP, Section.EVALUATION) and self.steps < START_STEPS)


@dataclass(frozen=True)
class Missing:
    """Ranks that others wait for, as one knows that all tell what they are ready for; `text` says so in a line for each."""

    ranks: tuple[int, ...] = ()
    text: str = ""

    def to_json(self) -> str:
        """As a note, cut to the room that there is."""
        text = self.text.encode()[:_MOST_TEXT_BYTES].decode(errors="ignore")
        return json.dumps({"ranks": self.ranks[:_MOST_MISSING], "text": text}, ensure_ascii=False)

    @classmethod
    def from_json(cls, note: str) -> "Missing":
        """What a note says; nobody, if it is none, or half of one."""
        with suppress(ValueError, KeyError, TypeError):
            fields = json.loads(note)
            return cls(tuple(int(rank) for rank in fields["ranks"]), str(fields["text"]))
        return cls()


class Pulse:
    """The page of this process, to be written to. Closed, it is memory of its own."""

    def __init__(self) -> None:
        self._release = ExitStack()
        self._kinds: dict[str, bytes] = {}
        self._awaited = _NO_KIND
        self._reset()

    def open(self, timeout_s: float, environ: Mapping[str, str] = os.environ) -> None:
        """Has the launcher read what is said from now on, if it is Hora's; `close` ends that. `timeout_s` as in `Words`."""
        self.close()
        job_dir, rank = environ.get(env.JOB_DIR), environ.get("RANK", "")
        if job_dir is not None and rank.isdecimal():
            with suppress(OSError):  # it is no reason to fail that nobody watches
                self._use(_map(page_path(Path(job_dir), int(rank))))
                self._release.enter_context(_telling_stacks(stacks_path(Path(job_dir), int(rank))))
        self._numbers[_PID] = os.getpid()
        self.allow(timeout_s)
        self._numbers[_PAGE_VERSION] = _VERSION
        self._section = Section.START
        self.rest()

    def allow(self, timeout_s: float) -> None:
        """Others may be waited for so long from now on."""
        self._numbers[_TIMEOUT_MS] = int(1e3 * min(timeout_s, 1e12))

    def close(self) -> None:
        """Says that this process is in no job, and lets go of the page. May be called again."""
        self._section = Section.OUTSIDE
        self._say(Doing.OWN)
        self._release.close()
        self._reset()

    def _reset(self) -> None:
        self._use(memoryview(bytearray(_PAGE_BYTES)))
        self._words = self._steps = 0
        self._section = Section.OUTSIDE
        self._base = self._doing = Doing.OWN
        self._since_ns = perf_counter_ns()
        self._spent_ns = [0] * len(Doing)

    def _use(self, page: memoryview) -> None:
        self._page, self._numbers = page, page.cast("Q")

    # Words ------------------------------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A step is under way."""
        if self._steps:
            self._section = _STEP
        self._base = _WORK
        self._say(_WORK)

    def await_sums(self) -> None:
        """All that is left of the step's backward is to wait for other ranks, until `begin_step`."""
        self._base = _WAIT
        self._say(_WAIT)

    def end_step(self) -> None:
        """It has ended."""
        self._steps += 1
        self._numbers[_STEPS] = self._steps
        self._numbers[_WAITED_NS] = self._spent_ns[_WAIT] + self._spent_ns[_CALLING]
        self._numbers[_DATA_NS] = self._spent_ns[_DATA]
        self._section = _EVALUATION
        self._base = _OWN
        self._say(_OWN)

    def turn_to(self, doing: Doing) -> None:
        """This rank does something else, until `rest`."""
        self._say(doing)

    def rest(self) -> None:
        """It does again what it does in this section."""
        self._say(self._base)

    @contextmanager
    def section(self, section: Section) -> Iterator[None]:
        """What is inside the `with` block is `section`."""
        before, base = self._section, self._base
        self._section, self._base = section, _WORK
        self.rest()
        try:
            yield
        finally:
            self._section, self._base = before, base
            self.rest()

    @contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """What is inside the `with` block waits for ranks that are to be ready for `what`, while another thread makes collectives."""
        before, base = self._awaited, self._base
        self._awaited, self._base = _kind_bytes(what), _WAIT
        self._page[_KIND_PLACE] = self._awaited
        self._numbers[_CALL] = 0
        self.rest()
        try:
            yield
        finally:
            self._awaited, self._base = before, base
            self._page[_KIND_PLACE] = before
            self.rest()

    def note(self, text: str) -> None:
        """Says what is known of ranks that others wait for (`Words.note`), in place of what was said before; it is no progress."""
        content = text.encode()[:_NOTE_BYTES]
        self._numbers[_NOTE] = 0
        self._page[_NOTE_TEXT : _NOTE_TEXT + len(content)] = content
        self._numbers[_NOTE] = len(content)

    def begin_call(self, kind: str, begun: int, call: int) -> None:
        """A collective begins (`call` as in `Words`); `begun` have begun so far."""
        name = self._kinds.get(kind)
        if name is None:
            name = self._kinds[kind] = _kind_bytes(kind)
        self._page[_KIND_PLACE] = name
        self._numbers[_BEGUN], self._numbers[_CALL] = begun, call
        self._say(_CALLING)

    def end_call(self, finished: int) -> None:
        """It has ended, in whatever way; `finished` have finished so far."""
        self._numbers[_FINISHED] = finished
        self._page[_KIND_PLACE] = self._awaited
        self.rest()

    def _say(self, doing: Doing) -> None:
        now = perf_counter_ns()
        self._spent_ns[self._doing] += now - self._since_ns
        self._doing, self._since_ns = doing, now
        self._words += 1
        self._numbers[_PLACE] = self._section << 8 | doing
        self._numbers[_COUNT] = self._words


_mine = Pulse()


def mine() -> Pulse:
    """The page of this process."""
    return _mine


# The files ------------------------------------------------------------------------------------------------------------------------------


def page_path(job_dir: Path, rank: int) -> Path:
    """Where the page of a rank is."""
    return job_dir / f"pulse-{rank}"


def stacks_path(job_dir: Path, rank: int) -> Path:
    """Where the stacks of a rank are written to."""
    return job_dir / f"stacks-{rank}"


def read_words(path: Path) -> Words | None:
    """What a rank has said; None if it has said nothing."""
    try:
        page = path.read_bytes()
    except OSError:
        return None
    if len(page) < _PAGE_BYTES:
        return None
    numbers = memoryview(page).cast("Q")
    if not numbers[_COUNT] or numbers[_PAGE_VERSION] != _VERSION:
        return None
    place = numbers[_PLACE]
    return Words(
        count=numbers[_COUNT],
        section=Section(place >> 8),
        doing=Doing(place & 0xFF),
        steps=numbers[_STEPS],
        begun=numbers[_BEGUN],
        finished=numbers[_FINISHED],
        call=numbers[_CALL],
        kind=page[8 * _KIND : 8 * _KIND + _KIND_BYTES].partition(b"\0")[0].decode(errors="replace"),
        waited_s=numbers[_WAITED_NS] / _NS,
        data_s=numbers[_DATA_NS] / _NS,
        pid=numbers[_PID],
        timeout_s=numbers[_TIMEOUT_MS] / 1e3,
        note=page[_NOTE_TEXT : _NOTE_TEXT + min(numbers[_NOTE], _NOTE_BYTES)].decode(errors="replace"),
    )


def _kind_bytes(kind: str) -> bytes:
    return kind.encode()[:_KIND_BYTES].ljust(_KIND_BYTES, b"\0")


def _map(path: Path) -> memoryview:
    """The page in a file. It is unmapped when nobody holds it any more."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, _PAGE_BYTES)
        return memoryview(mmap.mmap(descriptor, _PAGE_BYTES))
    finally:
        os.close(descriptor)


@contextmanager
def _telling_stacks(path: Path) -> Iterator[None]:
    """Inside the `with` block `ASK` has the stacks of all threads written to the end of the file; not where the script uses the signal itself."""
    if ASK is None or not hasattr(faulthandler, "register") or signal.getsignal(ASK) is not signal.SIG_DFL:
        yield
        return
    with path.open("ab", buffering=0) as file:
        faulthandler.register(ASK, file=file, all_threads=True, chain=False)
        try:
            yield
        finally:
            faulthandler.unregister(ASK)
