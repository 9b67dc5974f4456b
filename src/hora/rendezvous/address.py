"""Where a rendezvous listens: a Unix socket in a private directory, or a TCP port of exactly one address.

`parse_address` reads `unix:///path` and `tcp://host:port`; both kinds of address listen, connect, and say whether the process at the other
end belongs to this user. Sockets made here are closed in forked children: a data loader's worker that kept them open would hide the
death of its rank from everybody else.
"""

import errno
import os
import socket
import stat
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from hora import env
from hora.errors import ConfigError, LaunchError

BACKLOG = 512

# A peer whose machine vanished without a word counts as gone after 1 + 3 * 1 = 4 s of silence, or after 4 s in which it did not confirm
# what was sent to it (which otherwise is repeated for a quarter of an hour). The kernel answers, however busy the processes are.
_VANISHED = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 4_000}


class Address(Protocol):
    """Something to listen on and to connect to; `str()` of it can be parsed again."""

    def listen(self) -> socket.socket:
        """A listening socket, non-blocking."""

    def bound(self, listener: socket.socket) -> "Address":
        """The address under which `listener` is reached: a port of 0 has become a real one."""

    def connect(self, timeout_s: float) -> socket.socket:
        """A connected socket with that timeout."""

    def prepare(self, connection: socket.socket) -> None:
        """Sets the options of a connection, on either side."""

    def remove(self) -> None:
        """Takes away what listening left in the file system."""


def parse_address(text: str) -> Address:
    """Reads `unix:///path` or `tcp://host:port`.

    Raises:
        ConfigError: it is neither.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
        return UnixAddress(Path(parts.path))
    if parts.scheme == "tcp" and parts.hostname and port is not None and not parts.path:
        return TcpAddress(parts.hostname, port)
    raise ConfigError(f"a rendezvous address must read unix:///path or tcp://host:port, but is {text!r} instead")


def local_address(directory: str | os.PathLike[str]) -> str:
    """Where the rendezvous of a job on one node should listen: a Unix socket in the private `directory`, else a port of loopback."""
    if hasattr(socket, "AF_UNIX") and not env.portable_only():
        return f"unix://{Path(directory).absolute()}/rendezvous.sock"
    return "tcp://127.0.0.1:0"


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this user, as the kernel says; True where it cannot say (TCP)."""
    if connection.family != getattr(socket, "AF_UNIX", None) or not hasattr(socket, "SO_PEERCRED"):
        return True
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(uid == os.geteuid())


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(connection: socket.socket) -> socket.socket:
    """Has `connection` closed in every process forked from this one; returns it."""
    _sockets.add(connection)
    return connection


def _close_inherited() -> None:
    for connection in list(_sockets):
        connection.close()
    _sockets.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


@dataclass(frozen=True)
class UnixAddress:
    """A socket at `path`, whose directory must belong to this user alone (mode 0700)."""

    path: Path

    def __str__(self) -> str:
        return f"unix://{self.path}"

    def listen(self) -> socket.socket:
        """Listens at the path; a socket that a killed process has left there makes room.

        Raises:
            LaunchError: the directory is not private, or something else is at the path already; it is left as it is.
        """
        listener = socket.socket(socket.AF_UNIX)
        try:
            with _private_directory(self.path.parent) as directory:
                _bind(listener, f"{directory}/{self.path.name}")
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise LaunchError(
                f"the rendezvous must make its socket at {self.path}, but cannot: {error.strerror or error}; name a path that is free"
            ) from error
        except LaunchError:
            listener.close()
            raise
        listener.setblocking(False)
        return close_in_children(listener)

    def bound(self, listener: socket.socket) -> "UnixAddress":  # noqa: ARG002
        """This address."""
        return self

    def connect(self, timeout_s: float) -> socket.socket:
        """Connects to the socket at the path.

        Raises:
            OSError: nobody listens there.
            LaunchError: the directory is not private, or the process that listens is another user's.
        """
        connection = close_in_children(socket.socket(socket.AF_UNIX))
        try:
            connection.settimeout(timeout_s)
            with _private_directory(self.path.parent) as directory:
                connection.connect(f"{directory}/{self.path.name}")
            if not same_user(connection):
                raise LaunchError(f"the process that listens at {self.path} must be one of this user's, but is another's; remove the path")
        except BaseException:
            connection.close()
            raise
        return connection

    def prepare(self, connection: socket.socket) -> None:
        """Nothing to set."""

    def remove(self) -> None:
        """Removes the socket from its directory."""
        with suppress(OSError):
            self.path.unlink()


def _bind(listener: socket.socket, path: str) -> None:
    try:
        listener.bind(path)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not _is_abandoned(path):
            raise
        os.unlink(path)
        listener.bind(path)


def _is_abandoned(path: str) -> bool:
    """Whether a socket is at the path at which nobody listens any more."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False  # perhaps too many wait there
    return False


@dataclass(frozen=True)
class TcpAddress:
    """A port of one network address; port 0 means a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    def listen(self) -> socket.socket:
        """Listens at that address alone.

        Raises:
            LaunchError: the host is none of this machine's, or the port is taken.
        """
        try:
            family, _, _, _, where = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise self._cannot_listen(error) from error
        try:
            if os.name == "posix":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise self._cannot_listen(error) from error
        listener.setblocking(False)
        return close_in_children(listener)

    def _cannot_listen(self, error: OSError) -> LaunchError:
        remedy = "choose another port" if error.errno == errno.EADDRINUSE else "name an address of this machine"
        return LaunchError(f"the rendezvous must listen at {self}, but cannot: {error.strerror or error}; {remedy}")

    def bound(self, listener: socket.socket) -> "TcpAddress":
        """The numeric address and the real port."""
        host, port = listener.getsockname()[:2]
        return TcpAddress(host, port)

    def connect(self, timeout_s: float) -> socket.socket:
        """Connects to the port.

        Raises:
            OSError: nobody listens there.
        """
        connection = close_in_children(socket.create_connection((self.host, self.port), timeout=timeout_s))
        self.prepare(connection)
        return connection

    def prepare(self, connection: socket.socket) -> None:
        """Sends small messages at once, and notices a peer whose machine has vanished."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _VANISHED.items():
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def remove(self) -> None:
        """Nothing is left behind."""


@contextmanager
def _private_directory(path: Path) -> Iterator[str]:
    """Yields a path of the directory that was checked to be private: the very one, and short where the system allows it.

    A Unix socket's path is limited to some hundred bytes; `/proc/self/fd/N` is shorter than most directories, and nobody can exchange the
    directory between the check and the use.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise LaunchError(
                f"the directory {path} must belong to user {os.geteuid()} with mode 0700, but belongs to {status.st_uid} with mode "
                f"{stat.S_IMODE(status.st_mode):04o} instead; name a private directory"
            )
        short = f"/proc/self/fd/{descriptor}"
        yield short if os.path.isdir(short) else os.fspath(path)
    finally:
        os.close(descriptor)
