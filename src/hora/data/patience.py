"""An end to waiting for worker processes in the kernel, which torch's own timeout does not know of.

A worker hands over a tensor by a promise that it redeems when it is asked to: whoever takes the promise of a worker that is stopped meanwhile
waits in a socket without end. A thread ends the workers then, and with them the socket. Relies on nothing of torch.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

_LOOKS = 8


class Patience:
    """Calls `give_up`, in a thread, when what is inside of a `waiting` block takes longer than `timeout_s`. Used in a `with` block.

    Args:
        timeout_s: 0: for ever.
        give_up: called once.
    """

    def __init__(self, timeout_s: float, give_up: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._give_up = give_up
        self._since_s: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hora-patience", daemon=True)
        self.lost = False

    def __enter__(self) -> Self:
        if self._timeout_s > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._timeout_s > 0:
            self._thread.join()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What is inside the `with` block may take `timeout_s`."""
        self._since_s = time.monotonic()
        try:
            yield
        finally:
            self._since_s = None

    def _watch(self) -> None:
        while not self._over.wait(self._timeout_s / _LOOKS):
            since_s = self._since_s
            if since_s is not None and time.monotonic() - since_s > self._timeout_s:
                self.lost = True
                self._give_up()
                return
