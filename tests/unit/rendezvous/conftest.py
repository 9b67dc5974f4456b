import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hora.rendezvous.client import Client
from hora.rendezvous.key import new_key
from hora.rendezvous.server import Server


@pytest.fixture
def key() -> bytes:
    return new_key()


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return f"unix://{tmp_path}/rendezvous.sock" if request.param == "unix" else "tcp://127.0.0.1:0"


@pytest.fixture
def server(address: str, key: bytes) -> Iterator[Server]:
    with Server(address, key).start() as server:
        yield server


@pytest.fixture
def connect(key: bytes) -> Iterator[Callable[..., Client]]:
    """Makes clients of a server and closes them at the end."""
    clients: list[Client] = []

    def make(server: Server | str, name: str = "rank 0", timeout_s: float = 20.0) -> Client:
        where = server if isinstance(server, str) else server.address
        clients.append(Client(where, key, name=name, timeout_s=timeout_s))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(server: Server, connect: Callable[..., Client]) -> Client:
    return connect(server)


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Returns as soon as a condition holds; fails if that takes 20 s."""

    def wait(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 20.0
        while not condition():
            assert time.monotonic() < end, "what was waited for did not come"
            time.sleep(0.001)

    return wait
