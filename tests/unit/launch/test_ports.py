"""The port that is kept for scripts of torch.distributed."""

import socket
import sys

import pytest

from hora.errors import ConfigError
from hora.launch.ports import loopback_interface, reserved_port, resolve


def bind(port: int, address: str = "127.0.0.1", *, reuse: bool = False) -> socket.socket:
    taker = socket.socket()
    try:
        if reuse:
            taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taker.bind((address, port))
    except OSError:
        taker.close()
        raise
    return taker


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps it")
@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_nobody_else_gets_it(address: str) -> None:
    with reserved_port(None) as port, pytest.raises(OSError, match="in use"):
        bind(port, address)


def test_a_store_that_reuses_addresses_can_listen_there() -> None:
    with reserved_port(None) as port, bind(port, "", reuse=True) as store:
        store.listen()


def test_it_is_free_afterwards() -> None:
    with reserved_port(None) as port:
        pass
    bind(port).close()


def test_in_the_portable_way_it_is_found_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORA_PORTABLE", "1")
    with reserved_port(None) as port:
        bind(port).close()


def test_a_wanted_port_is_given() -> None:
    with reserved_port(None) as port:
        pass
    with reserved_port(port) as again:
        assert again == port


def test_a_taken_port_is_refused() -> None:
    with bind(0) as holder:
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--master-port {port} is in use on this machine"), reserved_port(port):
            pass


def test_addresses_are_resolved() -> None:
    resolve("127.0.0.1")
    resolve("::1")


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 300, "256.256.256.256.256"])
def test_unknown_addresses_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="--master-addr .* must be a host name or an address that this machine can resolve"):
        resolve(host)


def test_the_loopback_interface_is_found() -> None:
    assert loopback_interface() in ("lo", "lo0")
