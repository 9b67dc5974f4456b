"""Messages between two ranks: rings of bytes in the segment, on which each message is a head (tag and size) and its bytes.

Who waits for a message moves bytes himself; a thread moves them for calls that nobody waits for yet, for their other end may.
"""

import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from hora.comm.backends.queued import THREAD_NAME, Failed
from hora.comm.backends.shm.engine import Engine
from hora.comm.torch_private import PythonWork

_HEAD = "qQ"
_HEAD_BYTES = struct.calcsize(_HEAD)
_SPINS, _PAUSE_S, _THREAD_PAUSE_S = 50, 2e-5, 1e-3
_LAST_MOVE_S = 10.0
"""How long the end waits for the thread, which moves what there is at most once more."""
_LOOK_S = 1e-2


class Letter(PythonWork):  # type: ignore[misc]
    """A message under way: the bytes of `flat`, with `tag`, to `peer` or from it (None: from anybody)."""

    def __init__(self, room: "Mailroom", tensor: Tensor, peer: int | None, tag: int):
        super().__init__()
        self.tensor, self.peer, self.tag = tensor, peer, tag
        self.flat = tensor.detach().contiguous().view(-1)
        self.data = self.flat.view(torch.uint8)
        self.error: BaseException | None = None
        self.done = False
        self._room = room

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        self._room.move_until(self, timeout.total_seconds() if timeout else None)
        if self.error is not None:
            raise self.error
        return True

    @override
    def is_completed(self) -> bool:
        self._room.move()
        return self.done

    @override
    def is_success(self) -> bool:
        return self.done and self.error is None

    @override
    def exception(self) -> BaseException | None:
        return self.error

    @override
    def result(self) -> list[Tensor]:
        return [self.tensor]

    def _source_rank(self) -> int:
        return -1 if self.peer is None else self.peer

    source_rank = _source_rank

    @override
    def get_future(self) -> Future[Any]:
        self.wait()
        future: Future[Any] = Future()
        future.set_result([self.tensor])
        return future

    def end(self, error: BaseException | None = None) -> None:
        """The bytes are where they belong, or never will be."""
        if error is None and self.tensor.data_ptr() != self.flat.data_ptr():
            self.tensor.detach().copy_(self.flat.view(self.tensor.shape))
        self.error, self.done = error, True


@dataclass
class _Arriving:
    """What stands at the head of the ring from one rank; `letter` is whom it is for, if that is known."""

    head: Tensor = field(default_factory=lambda: torch.empty(_HEAD_BYTES, dtype=torch.uint8, device="cpu"))
    head_read: int = 0
    tag: int = 0
    data: Tensor | None = None
    read: int = 0
    letter: Letter | None = None


@dataclass
class _Kept:
    """A message that came before anybody asked for it."""

    src: int
    tag: int
    data: Tensor


class Mailroom:
    """The messages of one rank.

    Args:
        engine: has the rings.
        timeout_s: of each message that does not give its own.
    """

    def __init__(self, engine: Engine, timeout_s: float):
        self._engine = engine
        self._timeout_s = timeout_s
        size = engine.segment.size
        self._outgoing: list[deque[tuple[Letter, deque[Tensor]]]] = [deque() for _ in range(size)]
        self._wanted: list[Letter] = []
        self._arriving = [_Arriving() for _ in range(size)]
        self._kept: list[_Kept] = []
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._closed = False
        self._thread: threading.Thread | None = None

    def send(self, tensor: Tensor, dst: int, tag: int) -> Letter:
        """Begins to send `tensor` to rank `dst`."""
        letter = Letter(self, tensor, dst, tag)
        head = torch.frombuffer(bytearray(struct.pack(_HEAD, tag, letter.data.numel())), dtype=torch.uint8)
        with self._lock:
            self._outgoing[dst].append((letter, deque([head, letter.data])))
        return self._begun(letter)

    def receive(self, tensor: Tensor, src: int | None, tag: int) -> Letter:
        """Begins to receive into `tensor` what rank `src` sends with `tag`."""
        letter = Letter(self, tensor, src, tag)
        with self._lock:
            self._wanted.append(letter)
        return self._begun(letter)

    def close(self) -> None:
        """Ends what is under way with an error, and the thread: one that frees tensors while the interpreter ends aborts the process."""
        with self._lock:
            self._closed = True
            self._work.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_LAST_MOVE_S)

    # Moving -----------------------------------------------------------------------------------------------------------------------------

    def _begun(self, letter: Letter) -> Letter:
        self.move()
        if not letter.done:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._move_for_others, name=THREAD_NAME, daemon=True)
                    self._thread.start()
                self._work.notify()
        return letter

    def _move_for_others(self) -> None:
        while not self._closed:
            time.sleep(_THREAD_PAUSE_S)
            self.move()
            with self._lock:
                if not self._closed and not self._sources() and not any(self._outgoing):
                    self._work.wait()

    def move(self) -> bool:
        """Moves what can be moved; whether anything was."""
        with self._lock:
            moved = False
            for dst, queue in enumerate(self._outgoing):
                moved |= bool(queue) and self._send_some(dst)
            self._deliver_kept()
            for src in self._sources():
                moved |= self._receive_some(src)
            return moved

    def move_until(self, letter: Letter, timeout_s: float | None) -> None:
        """Moves until `letter` is done."""
        begun = looked = time.monotonic()
        idle = 0
        while not letter.done:
            idle = 0 if self.move() else idle + 1
            if idle > _SPINS and not letter.done:
                time.sleep(_PAUSE_S)
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                self._give_up_if_hopeless(letter, now - begun, self._timeout_s if timeout_s is None else timeout_s)

    def _give_up_if_hopeless(self, letter: Letter, waited_s: float, timeout_s: float) -> None:
        segment = self._engine.segment
        peers = [letter.peer] if letter.peer is not None else [rank for rank in range(segment.size) if rank != segment.rank]
        lost = [peer for peer in peers if not segment.takes_part(peer)]
        who = "any rank" if letter.peer is None else f"rank {letter.peer}"
        if self._closed:
            self._abandon(letter, "connection closed: this rank has left the group")
        elif lost and len(lost) == len(peers) and not self.move():  # what it sent before it left still counts
            self._abandon(letter, f"connection lost: rank {lost[0]} of the group is gone")
        elif waited_s > timeout_s:
            self._abandon(letter, f"timed out: waited {waited_s:.1f} s for a message to or from {who} of the group")

    def _abandon(self, letter: Letter, why: str) -> None:
        with self._lock:
            if not letter.done:
                self._wanted = [other for other in self._wanted if other is not letter]
                letter.end(Failed(why))

    # Sending ----------------------------------------------------------------------------------------------------------------------------

    def _send_some(self, dst: int) -> bool:
        queue, moved = self._outgoing[dst], False
        while queue:
            letter, pieces = queue[0]
            while pieces:
                count = self._engine.write(dst, pieces[0])
                moved |= count > 0
                if count < pieces[0].numel():
                    pieces[0] = pieces[0][count:]
                    return moved
                pieces.popleft()
            queue.popleft()
            letter.end()
        return moved

    # Receiving --------------------------------------------------------------------------------------------------------------------------

    def _sources(self) -> list[int]:
        """Ranks from which something is wanted or half received."""
        segment = self._engine.segment
        if any(letter.peer is None for letter in self._wanted):
            return [rank for rank in range(segment.size) if rank != segment.rank]
        half = {src for src, arriving in enumerate(self._arriving) if arriving.data is not None}
        return sorted(half | {letter.peer for letter in self._wanted if letter.peer is not None})

    def _receive_some(self, src: int) -> bool:
        moved = False
        while (arriving := self._arriving[src]).data is not None or any(letter.peer in (src, None) for letter in self._wanted):
            if arriving.data is None:
                count = self._engine.read(src, arriving.head[arriving.head_read :])
                arriving.head_read += count
                moved |= count > 0
                if arriving.head_read < _HEAD_BYTES:
                    break
                self._open(src, arriving)
            assert arriving.data is not None
            count = self._engine.read(src, arriving.data[arriving.read :])
            arriving.read += count
            moved |= count > 0
            if arriving.read < arriving.data.numel():
                break
            self._arriving[src] = _Arriving()
            self._settle(src, arriving)
        return moved

    def _open(self, src: int, arriving: _Arriving) -> None:
        """The head is there: whom is it for?"""
        arriving.tag, size = struct.unpack(_HEAD, arriving.head.numpy().tobytes())
        letter = next((one for one in self._wanted if one.peer in (src, None) and one.tag == arriving.tag), None)
        if letter is not None and letter.data.numel() == size:
            self._wanted.remove(letter)
            letter.peer, arriving.letter, arriving.data = src, letter, letter.data
        else:
            arriving.data = torch.empty(size, dtype=torch.uint8, device="cpu")

    def _settle(self, src: int, arriving: _Arriving) -> None:
        """All bytes are there."""
        if arriving.letter is not None:
            arriving.letter.end()
            return
        assert arriving.data is not None
        self._kept.append(_Kept(src, arriving.tag, arriving.data))
        self._deliver_kept()

    def _deliver_kept(self) -> None:
        for kept in list(self._kept):
            letter = next((one for one in self._wanted if one.peer in (kept.src, None) and one.tag == kept.tag), None)
            if letter is None:
                continue
            self._kept.remove(kept)
            self._wanted.remove(letter)
            letter.peer = kept.src
            if letter.data.numel() != kept.data.numel():
                sizes = f"{kept.data.numel()} bytes where {letter.data.numel()} are wanted"
                letter.end(Failed(f"a message must fit what it is received into, but rank {kept.src} sent {sizes}"))
                continue
            letter.data.copy_(kept.data)
            letter.end()
