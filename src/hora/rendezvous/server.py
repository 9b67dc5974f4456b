"""The key-value store through which the processes of a job find each other; one thread serves all of them.

Whoever connects has to prove that it knows the job's key before anything it says is looked at (see `protocol`); on a Unix socket the
kernel must also say that it is the same user. Connections that have not proved themselves have a deadline and a small allowance of their own, of
which the oldest goes first, so that strangers cannot keep the job's processes out. Relies on `table` for what requests mean; keeps everything in
memory and forgets it when it is closed.
"""

import errno
import os
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType

from hora.log import get_logger
from hora.rendezvous.address import close_in_children, parse_address, same_user
from hora.rendezvous.protocol import DEFAULT_MAX_FRAME_BYTES, FRAME_OVERHEAD_BYTES, ProtocolError, ServerSide, pack, unpack
from hora.rendezvous.table import OK, REFUSED, Answer, Table, Waiter

MAX_STRANGERS = 256
"""How many connections may be in their handshake at a time."""

_ACCEPTS_AT_A_TIME = 16
_KINDS_OF_REFUSAL = 64
_RECEIVE_BYTES = 1 << 16
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ACCEPT_PAUSE_S = 0.05
# The system takes no deadline that is further away than 24 days.
_LONGEST_LOOK_S = 3600.0
_ENDING, _NOTED = b"x", b"n"


class _Connection:
    """One client's connection; a stranger's until it has proved itself and said who it is."""

    def __init__(self, sock: socket.socket, side: ServerSide, deadline: float, host: str | None) -> None:
        self.sock = sock
        self.side = side
        self.deadline = deadline
        self.name = "a stranger" if host is None else f"a stranger at {host}"
        self.waiter: Waiter | None = None
        self.wills: dict[bytes, bytes] = {}

    @property
    def owed(self) -> bool:
        """Whether the client has not got the answer to its last request."""
        return self.waiter is not None or bool(self.side.outgoing)


class Server:
    """Serves the rendezvous of one job at `address`, to those who know `key`.

    Args:
        address: `unix:///path` (in a directory of mode 0700) or `tcp://host:port`; exactly this address is listened at. Port 0: a free one.
        key: the job's secret, 32 bytes.
        max_frame_bytes: largest message either way; a longer one closes its connection before anything is kept of it.
        max_connections: how many proven connections there may be.
        handshake_timeout_s: how long a stranger has to prove itself.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        *,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        max_connections: int = 4096,
        handshake_timeout_s: float = 5.0,
    ) -> None:
        self._address = parse_address(address)
        self._key = key
        self._max_frame_bytes = max_frame_bytes
        self._max_connections = max_connections
        self._handshake_timeout_s = handshake_timeout_s
        self._table = Table(max_answer_bytes=max_frame_bytes - FRAME_OVERHEAD_BYTES, notify=self._answer_waiter)
        self._strangers: dict[_Connection, None] = {}
        self._clients: set[_Connection] = set()
        self._waiting: dict[Waiter, _Connection] = {}
        self._refused: Counter[tuple[str, str]] = Counter()
        self._accept_again_at: float | None = None
        self._noted: deque[str] = deque()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"Server({self.address!r})"

    @property
    def address(self) -> str:
        """Where clients reach it; after `start` with the real port."""
        return str(self._address)

    def start(self) -> "Server":
        """Listens and serves in a thread of its own; returns itself.

        Raises:
            LaunchError: it cannot listen there; the message says why.
        """
        with ExitStack() as held:
            self._listener = held.enter_context(self._address.listen())
            self._address = self._address.bound(self._listener)
            held.callback(self._address.remove)
            self._wake_sender, self._wake_receiver = (held.enter_context(close_in_children(sock)) for sock in socket.socketpair())
            self._selector = held.enter_context(selectors.DefaultSelector())
            self._selector.register(self._listener, selectors.EVENT_READ, self._listener)
            self._selector.register(self._wake_receiver, selectors.EVENT_READ)
            self._pid = os.getpid()
            self._thread = threading.Thread(target=self._serve, args=(held.pop_all(),), name="hora-rendezvous", daemon=True)
            self._thread.start()
        return self

    def note(self, key: str) -> None:
        """Sets `key` to nothing, as a client would; returns at once. Does nothing when the server has ended."""
        self._noted.append(key)
        self._wake(_NOTED)

    def close(self) -> None:
        """Ends the thread and every connection; clients see a ConnectionError. Does nothing a second time, or in a forked child."""
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._pid:
            return
        self._wake(_ENDING)
        thread.join()

    def _wake(self, why: bytes) -> None:
        with suppress(OSError):  # the thread has ended
            self._wake_sender.send(why)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # The rest runs in the thread.

    def _serve(self, held: ExitStack) -> None:
        with held:
            try:
                while self._turn():
                    pass
            finally:
                for connection in [*self._strangers, *self._clients]:
                    connection.sock.close()

    def _turn(self) -> bool:
        """Waits for something to do and does it; False when the server is to end."""
        events = self._selector.select(self._patience_s())
        for event, mask in events:
            if event.data is None:
                if not self._heed():
                    return False
                continue
            if isinstance(event.data, _Connection):
                self._guarded(event.data, self._send if mask & selectors.EVENT_WRITE else self._receive)
            else:
                self._accept()
        self._expire(time.monotonic())
        return True

    def _heed(self) -> bool:
        """Does what this process asks for; False: the server is to end."""
        if _ENDING in self._wake_receiver.recv(_RECEIVE_BYTES):
            return False
        while self._noted:
            self._table.set(self._noted.popleft().encode(), b"")
        return True

    def _patience_s(self) -> float | None:
        """How long nothing needs to be done unless somebody calls."""
        first_stranger = next((stranger.deadline for stranger in self._strangers), None)
        known = [moment for moment in (self._table.next_deadline(), first_stranger, self._accept_again_at) if moment is not None]
        return max(0.0, min(min(known) - time.monotonic(), _LONGEST_LOOK_S)) if known else None

    def _expire(self, now: float) -> None:
        self._table.expire(now)
        for connection in [stranger for stranger in self._strangers if stranger.deadline <= now]:
            self._refuse(connection, "it did not finish the handshake in time")
        if self._accept_again_at is not None and self._accept_again_at <= now:
            self._accept_again_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._listener)

    def _accept(self) -> None:
        for index in range(_ACCEPTS_AT_A_TIME):
            try:
                sock, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Linux says so even if nobody waits any more: only the first time it is sure that somebody does.
                if error.errno in _OUT_OF_DESCRIPTORS and index == 0:
                    self._make_room()
                return
            self._welcome(close_in_children(sock), peer[0] if isinstance(peer, tuple) else None)

    def _make_room(self) -> None:
        """Frees a descriptor at the cost of the oldest stranger; without one, stops accepting for a moment rather than spin."""
        if self._strangers:
            self._refuse(next(iter(self._strangers)), "this process has no file descriptors left")
        else:
            self._selector.unregister(self._listener)
            self._accept_again_at = time.monotonic() + _ACCEPT_PAUSE_S

    def _welcome(self, sock: socket.socket, host: str | None) -> None:
        side = ServerSide(self._key, max_frame_bytes=self._max_frame_bytes)
        connection = _Connection(sock, side, time.monotonic() + self._handshake_timeout_s, host)
        try:
            sock.setblocking(False)
            self._address.prepare(sock)
            trusted = same_user(sock)
        except OSError:
            sock.close()
            return
        self._strangers[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)
        if not trusted:
            self._refuse(connection, "it is another user's")
        elif len(self._strangers) > MAX_STRANGERS:
            self._refuse(next(iter(self._strangers)), "too many connections were in their handshake")

    def _guarded(self, connection: _Connection, act: Callable[[_Connection], None]) -> None:
        """Does something for one connection, whose failure must not touch the others."""
        if connection not in self._strangers and connection not in self._clients:
            return
        try:
            act(connection)
        except BlockingIOError:
            pass
        except ProtocolError as error:
            self._refuse(connection, str(error))
        except OSError:
            self._drop(connection)
        except Exception:
            get_logger().exception("the rendezvous failed on a request of %s and closes its connection", connection.name)
            self._drop(connection)

    def _receive(self, connection: _Connection) -> None:
        data = connection.sock.recv(_RECEIVE_BYTES)
        if not data:
            self._drop(connection)
            return
        for payload in connection.side.feed(data):
            if connection.owed:
                raise ProtocolError("it spoke before it had its answer")
            self._carry_out(connection, unpack(payload))
        if connection.side.outgoing:
            self._send(connection)

    def _carry_out(self, connection: _Connection, request: list[bytes]) -> None:
        match request:
            case [b"hello", name]:
                self._admit(connection, name.decode(errors="replace"))
            case _ if connection in self._strangers:
                raise ProtocolError("it did not say who it is")
            case [b"will", key, value]:
                connection.wills[key] = value
                self._reply(connection, [OK])
            case [b"goodbye"]:
                connection.wills.clear()
                raise ConnectionAbortedError("the client took leave")
            case _:
                self._look_up(connection, request)

    def _admit(self, connection: _Connection, name: str) -> None:
        if len(self._clients) >= self._max_connections:
            self._reply(connection, [REFUSED, f"it has the {self._max_connections} connections already that it allows".encode()])
            return
        connection.name = name
        self._strangers.pop(connection, None)
        self._clients.add(connection)
        self._reply(connection, [OK, b"%d" % self._max_frame_bytes])

    def _look_up(self, connection: _Connection, request: list[bytes]) -> None:
        answer = self._table.apply(request, time.monotonic())
        if isinstance(answer, Waiter):
            connection.waiter = answer
            self._waiting[answer] = connection
        else:
            self._reply(connection, answer)

    def _answer_waiter(self, waiter: Waiter) -> None:
        connection, answer = self._waiting.pop(waiter), waiter.answer
        assert answer is not None
        connection.waiter = None
        self._guarded(connection, lambda connection: self._reply(connection, answer))

    def _reply(self, connection: _Connection, answer: Answer) -> None:
        connection.side.reply(pack(answer))
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        """Sends what the socket takes; while something is left nothing more is read from this client."""
        outgoing = connection.side.outgoing
        with suppress(BlockingIOError):
            del outgoing[: connection.sock.send(outgoing)]
        mask = selectors.EVENT_WRITE if outgoing else selectors.EVENT_READ
        if self._selector.get_key(connection.sock).events != mask:
            self._selector.modify(connection.sock, mask, connection)

    def _refuse(self, connection: _Connection, reason: str) -> None:
        """Closes a connection that broke the rules.

        Strangers can do so as often as they like, so only 1, 10, 100 ... of those are logged who come from one place for one reason, and from
        all places and for all reasons once there have been many: who has another key must not go unsaid because of somebody else's mistake.
        """
        kind = (connection.name, reason)
        if kind not in self._refused and len(self._refused) >= _KINDS_OF_REFUSAL:
            kind = ("", "")
        self._refused[kind] += 1
        count = self._refused[kind]
        if str(count).strip("0") == "1":
            get_logger().warning("the rendezvous refused %s: %s (refused so far: %d)", connection.name, reason, count)
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        """Forgets a connection and carries out its wills."""
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._strangers.pop(connection, None)
        self._clients.discard(connection)
        if connection.waiter is not None:
            self._table.forget(connection.waiter)
            del self._waiting[connection.waiter]
            connection.waiter = None
        for key, value in connection.wills.items():
            self._table.set(key, value)
