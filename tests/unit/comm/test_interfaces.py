import os
import socket

import psutil
import pytest

from hora.comm import interfaces
from hora.comm.interfaces import choose_interface, interface_of, variables_set


def addresses(name: str) -> set[str]:
    return {entry.address for entry in psutil.net_if_addrs()[name]}


def test_ranks_of_one_node_use_loopback():
    name = choose_interface([])
    assert name is not None
    assert "127.0.0.1" in addresses(name)


def test_ranks_of_several_nodes_use_the_interface_on_the_way(monkeypatch):
    monkeypatch.setattr(interfaces, "address_towards", {"self": "127.0.0.1", "other": "10.0.0.5"}.__getitem__)
    monkeypatch.setattr(interfaces, "interface_of", {"10.0.0.5": "ib0", "127.0.0.1": "lo"}.get)
    assert choose_interface(["self", "other"]) == "ib0"


def test_peers_that_cannot_be_resolved_leave_the_choice_to_the_backend(monkeypatch):
    def fail(host: str) -> str:
        raise socket.gaierror(f"{host} is unknown")

    monkeypatch.setattr(interfaces, "address_towards", fail)
    assert choose_interface(["nowhere"]) is None


def test_way_to_loopback_is_loopback():
    assert interfaces.address_towards("127.0.0.1") == "127.0.0.1"


def test_address_of_no_interface_has_none():
    assert interface_of("203.0.113.77") is None


def test_variables_last_as_long_as_the_block_and_never_replace_the_users(monkeypatch):
    monkeypatch.setenv("USERS", "mine")
    monkeypatch.delenv("OURS", raising=False)
    with pytest.raises(ZeroDivisionError), variables_set({"USERS": "other", "OURS": "set"}):
        assert (os.environ["USERS"], os.environ["OURS"]) == ("mine", "set")
        raise ZeroDivisionError
    assert os.environ["USERS"] == "mine"
    assert "OURS" not in os.environ
