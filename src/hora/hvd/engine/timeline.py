"""When each tensor was negotiated and worked on, as a trace of Chrome's (chrome://tracing, ui.perfetto.dev), in Horovod's form.

Written on rank 0. The file is a whole JSON array after each write, whatever becomes of the process.
"""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from hora.hvd.engine.entry import Entry
from hora.hvd.negotiation.request import Key, Request
from hora.hvd.negotiation.table import Ready

_END = b"\n]"


class Timeline:
    """Where events go: nowhere, until `start`."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._lock = threading.Lock()
        self._tensors: dict[Key, int] = {}
        self._negotiating: set[Key] = set()
        self._mark_cycles = False
        self._begun_s = 0.0

    def start(self, path: Path, mark_cycles: bool = False) -> None:
        """Begins to write to `path`, anew."""
        self.close()
        with self._lock:
            self._tensors.clear()
            self._negotiating.clear()
            self._begun_s, self._mark_cycles = time.monotonic(), mark_cycles
            file = path.open("wb")
            file.write(b"[" + _END)
            file.flush()
            self._file = file
        self._write([{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": int(time.time() * 1e6)}}])

    @property
    def is_on(self) -> bool:
        """Whether anything is written."""
        return self._file is not None

    def close(self) -> None:
        """Ends the file."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def negotiating(self, request: Request, rank: int) -> None:
        """`rank` is ready for `request`."""
        if self._file is None:
            return
        events = self._introduce(request)
        if request.key not in self._negotiating:
            self._negotiating.add(request.key)
            events.append(self._event(request.key, "B", f"NEGOTIATE_{request.kind}"))
        events.append(self._event(request.key, "X", str(rank), dur=0))
        self._write(events)

    def agreed(self, ready: Ready) -> None:
        """All are ready for it."""
        key = ready.request.key
        if self._file is not None and key in self._negotiating:
            self._negotiating.discard(key)
            self._write([self._event(key, "E")])

    @contextmanager
    def working(self, entries: Sequence[Entry]) -> Iterator[None]:
        """Inside the `with` block the operation is carried out."""
        if self._file is None:
            yield
            return
        if self._mark_cycles:
            self._write([{"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0, "ts": self._now()}])
        events: list[dict[str, Any]] = []
        for entry in entries:
            events += [*self._introduce(entry.request), self._event(entry.request.key, "B", entry.request.kind.value)]
        self._write(events)
        try:
            yield
        finally:
            self._write([self._ended(entry.request) for entry in entries])

    @contextmanager
    def activity(self, entries: Sequence[Entry], name: str) -> Iterator[None]:
        """Inside the `with` block a part of it is done."""
        if self._file is None:
            yield
            return
        self._write([self._event(entry.request.key, "B", name) for entry in entries if entry.request.key in self._tensors])
        try:
            yield
        finally:
            self._write([self._event(entry.request.key, "E") for entry in entries if entry.request.key in self._tensors])

    def _ended(self, request: Request) -> dict[str, Any]:
        parts = request.parts
        return self._event(
            request.key, "E", args={"dtype": parts[0].dtype if parts else "", "shape": str([list(part.shape) for part in parts])}
        )

    def _introduce(self, request: Request) -> list[dict[str, Any]]:
        if request.key in self._tensors:
            return []
        pid = self._tensors[request.key] = len(self._tensors) + 1
        return [
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": request.name}},
            {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}},
        ]

    def _event(self, key: Key, phase: str, name: str | None = None, **more: Any) -> dict[str, Any]:
        named = {} if name is None else {"name": name}
        return {"ph": phase, **named, "ts": self._now(), "pid": self._tensors[key], **more}

    def _now(self) -> int:
        return int((time.monotonic() - self._begun_s) * 1e6)

    def _write(self, events: Sequence[dict[str, Any]]) -> None:
        with self._lock:
            file = self._file
            if file is None or not events:
                return
            first = file.tell() == len(b"[" + _END)
            text = (b"" if first else b",") + b"\n" + b",\n".join(json.dumps(event).encode() for event in events)
            file.seek(-len(_END), 1)
            # In one write, so that a reader never sees the file without its end.
            file.write(text + _END)
            file.flush()
