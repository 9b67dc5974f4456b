"""The stores in which the ranks of a job can meet, and how each is opened.

A meeting says where; `open` goes there. On one node nothing that is opened here can be reached from another machine, except torchrun's own
store, which its agent has opened already.
"""

import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist
from typing_extensions import override

from hora.comm.awaiting import undisturbed
from hora.comm.deadline import Deadline
from hora.comm.store import RendezvousStore
from hora.comm.store_file import require_store
from hora.comm.torch_private import FileStore, HashStore, Store, TCPStore
from hora.errors import ConfigError, LaunchError, RendezvousTimeout
from hora.log import get_logger
from hora.rendezvous.address import UnixAddress, parse_address
from hora.rendezvous.client import Client
from hora.rendezvous.ended import ended_key
from hora.rendezvous.key import read_key, user_key
from hora.rendezvous.server import Server


class Meeting(ABC):
    """A place where all ranks of the job find one store."""

    @property
    @abstractmethod
    def hint(self) -> str:
        """What the user can do when ranks do not come here."""

    @property
    def host_of_zero(self) -> str | None:
        """Name or address of the host of rank 0, where it is known here; None: it is not."""
        return None

    def ended(self, store: Store, ranks: Sequence[int]) -> list[int]:  # noqa: ARG002 (most meetings do not know)
        """Those of `ranks` whose processes are known to have ended, and who come no more; `store` is what `open` gave."""
        return []

    def of_session(self, number: int) -> "Meeting":  # noqa: ARG002 (most places serve all)
        """Where these processes meet for their session `number`, counted from 0."""
        return self

    @abstractmethod
    def open(self, rank: int, world_size: int, deadline: Deadline, release: ExitStack) -> Store:
        """The shared store; what must be closed in the end is pushed on `release`."""


@dataclass(frozen=True)
class Alone(Meeting):
    """Nobody to meet: the store is this process's own memory."""

    @property
    @override
    def hint(self) -> str:
        return "nobody else is expected"

    @override
    def open(self, rank: int, world_size: int, deadline: Deadline, release: ExitStack) -> Store:
        return HashStore()


@dataclass(frozen=True)
class AtFile(Meeting):
    """A file on a disk that all ranks see; one beside it for each later session of these processes.

    Torch deletes a file when its last user closes it. A rank that comes for the next session would have it open by then, and lose what it
    has written.
    """

    path: Path
    session: int = 0

    @property
    @override
    def hint(self) -> str:
        return f"start the missing ranks, see that all are given the same file on a disk they share, and delete {self.file} if an earlier job left it"

    @property
    def file(self) -> Path:
        """Where it is."""
        return Path(f"{self.path}.{self.session}") if self.session else self.path

    @override
    def of_session(self, number: int) -> "AtFile":
        return replace(self, session=number)

    @override
    def open(self, rank: int, world_size: int, deadline: Deadline, release: ExitStack) -> Store:
        parent = os.path.dirname(os.path.realpath(self.file))
        if not os.path.isdir(parent):
            raise ConfigError(f"init_method file://{self.file} must name a file in a directory that exists, but {parent} does not")
        require_store(self.file, deadline)
        later = self.of_session(self.session + 1).file
        if later.exists():  # nobody of this job can have come so far yet
            raise ConfigError(f"{later}, in which the next session will meet, must not exist yet; delete it if an earlier job left it")
        try:
            return FileStore(str(self.file), world_size)
        except dist.DistStoreError as error:
            raise ConfigError(f"init_method file://{self.file} must name a file that can be written, but: {error}") from error


@dataclass(frozen=True)
class AtAgent(Meeting):
    """The store that torchrun's agent keeps."""

    host: str
    port: int

    @property
    @override
    def hint(self) -> str:
        return "see in torchrun's output what became of them"

    @override
    def open(self, rank: int, world_size: int, deadline: Deadline, release: ExitStack) -> Store:
        return TCPStore(self.host, self.port, world_size, False, timedelta(seconds=deadline.remaining_s))


@dataclass(frozen=True)
class AtLauncher(Meeting):
    """The store that Hora's launcher keeps; only holders of the job's key get in."""

    address: str
    key_file: str

    @property
    @override
    def hint(self) -> str:
        return "see in the launcher's output and in their logs what became of them"

    @override
    def open(self, rank: int, world_size: int, deadline: Deadline, release: ExitStack) -> Store:
        client = _connect(self.address, read_key(self.key_file), rank, deadline, release)
        return RendezvousStore(client, timeout_s=deadline.timeout_s)

    @override
    def ended(self, store: Store, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if store.check([ended_key(rank)])]


@dataclass(frozen=True)
class AtRankZero(Meeting):
    """A store that rank 0 keeps in its own process; only holders of the user's key get in. `several_nodes`: there are ranks on other machines."""

    address: str
    several_nodes: bool = False

    @property
    @override
    def hint(self) -> str:
        return f"start the missing ranks, see that all are given the same address ({self.address}) and that rank 0 can be reached there"

    @property
    @override
    def host_of_zero(self) -> str | None:
        return urlsplit(self.address).hostname  # none of a socket file

    @override
    def open(self, rank: int, world_size: int, deadline: Deadline, release: ExitStack) -> Store:
        key = user_key()
        if rank == 0:
            _make_private_directory(self.address)
            store, address = keep_store(self.address, key, deadline, release)
            if self.several_nodes:
                _require_reachable(self.address, address)
            return store
        return join_store(self.address, key, rank, deadline, release)


def keep_store(address: str, key: bytes, deadline: Deadline, release: ExitStack) -> tuple[Store, str]:
    """The store that this process, rank 0, keeps at `address`, and that address with its real port.

    It stays for those who have come and not left, within reason.
    """
    server = _serve(address, key, deadline, release)
    client = _connect(server.address, key, 0, deadline, release)

    def await_others(kind: type[BaseException] | None, *_: object) -> None:
        if not _hurries(kind):
            _await_goodbyes(client)

    release.push(await_others)
    return RendezvousStore(client, timeout_s=deadline.timeout_s), server.address


def _make_private_directory(address: str) -> None:
    """Makes the directory of a socket file; the state directory around it may be open to others' eyes."""
    parsed = parse_address(address)
    if isinstance(parsed, UnixAddress):
        parsed.path.parent.mkdir(mode=0o700, exist_ok=True)


def _serve(address: str, key: bytes, deadline: Deadline, release: ExitStack) -> Server:
    """A server at `address`, which is tried for a while where its name is not known: in a cluster that is just making it (Kubernetes) it soon is."""
    patience = Deadline(min(_NAME_S, deadline.remaining_s))
    told = False
    while True:
        try:
            with undisturbed():  # its thread must not be left to nobody
                return release.enter_context(Server(address, key).start())
        except LaunchError as error:
            if not isinstance(error.__cause__, socket.gaierror) or patience.passed:
                raise
        if not told:
            get_logger().warning("the name in %s is not known here; it is tried again for %.0f s", address, patience.timeout_s)
            told = True
        time.sleep(_NAME_PAUSE_S)


def _require_reachable(asked: str, found: str) -> None:
    """Refuses a name that leads to this machine's loopback, unless loopback is what was asked for.

    Raises:
        ConfigError: many systems keep their own host name at 127.0.1.1.
    """
    if found.startswith(_LOOPBACK) and not asked.startswith((*_LOOPBACK, "tcp://localhost")):
        raise ConfigError(
            f"rank 0 must listen where the other nodes reach it, but {asked} is {found} on its own node; let MASTER_ADDR be the address of its "
            "network interface, on all nodes, or mend /etc/hosts there"
        )


def join_store(address: str, key: bytes, rank: int, deadline: Deadline, release: ExitStack) -> Store:
    """The store that rank 0 keeps at `address`."""
    client = _connect(address, key, rank, deadline, release)
    # A name of its own, for two processes may come as one rank. The will speaks for one that is killed.
    name = f"{rank}.{secrets.token_hex(8)}"
    client.set_will(_BYE + name, b"lost")
    client.set(_CAME + name, b"")

    def take_leave(kind: type[BaseException] | None, *_: object) -> None:
        if _hurries(kind):
            client.close(take_leave=False)  # the will speaks
        else:
            _say_goodbye(address, key, name)

    release.push(take_leave)
    return RendezvousStore(client, timeout_s=deadline.timeout_s)


_CAME, _BYE = "came/", "bye/"
_LOOPBACK = ("tcp://127.", "tcp://[::1]")
_NAME_S, _NAME_PAUSE_S = 30.0, 0.5
_GOODBYE_TIMEOUT_S = 5.0


def _connect(address: str, key: bytes, rank: int, deadline: Deadline, release: ExitStack) -> Client:
    try:
        return release.enter_context(closing(Client(address, key, name=f"rank {rank}", timeout_s=deadline.remaining_s)))
    except (ConnectionError, TimeoutError) as error:
        raise RendezvousTimeout(str(error)) from error


def _hurries(kind: type[BaseException] | None) -> bool:
    """Whether what ends this process is Ctrl-C or another signal, and no error: nobody wants to wait then."""
    return kind is not None and not issubclass(kind, Exception)


def _say_goodbye(address: str, key: bytes, name: str) -> None:
    """Through a connection of its own, whose deadline is short: rank 0 may be stopped or gone."""
    with (
        suppress(ConnectionError, TimeoutError),
        closing(Client(address, key, name=f"rank {name}", timeout_s=_GOODBYE_TIMEOUT_S)) as client,
    ):
        client.set(_BYE + name, b"left")


def _await_goodbyes(client: Client) -> None:
    """Keeps the store open until every rank that came has left or is lost, within reason."""
    with suppress(ConnectionError, TimeoutError):
        client.wait([key.replace(_CAME, _BYE) for key in client.keys(_CAME)], _GOODBYE_TIMEOUT_S)
