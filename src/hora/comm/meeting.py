"""The stores in which the ranks of a job can meet, and how each is opened.

A meeting says where; `open` goes there. On one node nothing that is opened here can be reached from another machine, except torchrun's own
store, which its agent has opened already.
"""

from abc import ABC, abstractmethod
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from typing_extensions import override

from hora.comm.deadline import Deadline
from hora.comm.store import RendezvousStore
from hora.comm.torch_private import FileStore, HashStore, Store, TCPStore
from hora.errors import ConfigError, RendezvousTimeout
from hora.rendezvous.client import Client
from hora.rendezvous.key import read_key, user_key
from hora.rendezvous.server import Server


class Meeting(ABC):
    """A place where all ranks of the job find one store."""

    @property
    @abstractmethod
    def hint(self) -> str:
        """What the user can do when ranks do not come here."""

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
    """A file on a disk that all ranks see."""

    path: Path

    @property
    @override
    def hint(self) -> str:
        return f"start the missing ranks, see that all are given the same file on a disk they share, and delete {self.path} if an earlier job left it"

    @override
    def open(self, rank: int, world_size: int, deadline: Deadline, release: ExitStack) -> Store:
        if not self.path.parent.is_dir():
            raise ConfigError(
                f"init_method file://{self.path} must name a file in a directory that exists, but {self.path.parent} does not"
            )
        return FileStore(str(self.path), world_size)


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
        return _join_server(self.address, read_key(self.key_file), rank, deadline, release)


@dataclass(frozen=True)
class AtRankZero(Meeting):
    """A store that rank 0 keeps in its own process; only holders of the user's key get in."""

    address: str

    @property
    @override
    def hint(self) -> str:
        return f"start the missing ranks, see that all are given the same address ({self.address}) and that rank 0 can be reached there"

    @override
    def open(self, rank: int, world_size: int, deadline: Deadline, release: ExitStack) -> Store:
        key, address = user_key(), self.address
        if rank == 0:
            address = release.enter_context(Server(address, key).start()).address
        return _join_server(address, key, rank, deadline, release)


def _join_server(address: str, key: bytes, rank: int, deadline: Deadline, release: ExitStack) -> Store:
    try:
        client = release.enter_context(closing(Client(address, key, name=f"rank {rank}", timeout_s=deadline.remaining_s)))
    except (ConnectionError, TimeoutError) as error:
        raise RendezvousTimeout(str(error)) from error
    return RendezvousStore(client, timeout_s=deadline.timeout_s)
