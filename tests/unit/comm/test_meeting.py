"""Where rank 0 keeps the store: by names that are not known yet, and by names that lead astray."""

import socket
from contextlib import ExitStack

import pytest

from hora.comm import meeting
from hora.comm.deadline import Deadline
from hora.comm.meeting import AtRankZero
from hora.errors import ConfigError, LaunchError


@pytest.fixture
def names(monkeypatch, tmp_path):
    """Addresses by name, the last of several for good; None: it is not known."""
    monkeypatch.setenv("HORA_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(meeting, "_NAME_PAUSE_S", 0.01)
    names: dict[str, list[str | None]] = {}
    resolve = socket.getaddrinfo

    def look_up(host, *args, **kwargs):
        addresses = names.get(host, [host])
        address = addresses.pop(0) if len(addresses) > 1 else addresses[0]
        if address is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(address, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return names


def keep(name: str, *, several_nodes: bool) -> None:
    with ExitStack() as release:
        AtRankZero(f"tcp://{name}:0", several_nodes).open(0, 2, Deadline(20.0), release)


def test_a_name_that_is_made_only_now_is_waited_for(names, caplog):
    names["train-master-0"] = [None, None, "127.0.0.1"]
    keep("train-master-0", several_nodes=False)
    assert len([record for record in caplog.records if "train-master-0:0 is not known here; it is tried again" in record.message]) == 1


def test_a_name_that_stays_unknown_is_an_error(names, monkeypatch):
    names["nowhere"] = [None]
    monkeypatch.setattr(meeting, "_NAME_S", 0.03)
    with pytest.raises(LaunchError, match=r"tcp://nowhere:0, but cannot: Name or service not known; name an address"):
        keep("nowhere", several_nodes=False)


def test_a_name_that_other_nodes_cannot_follow_is_refused_where_there_are_any(names):
    names["node0"] = ["127.0.1.1"]
    with pytest.raises(ConfigError, match=r"tcp://node0:0 is tcp://127\.0\.1\.1:\d+ on its own node; let MASTER_ADDR be the address"):
        keep("node0", several_nodes=True)
    keep("node0", several_nodes=False)
    keep("127.0.0.1", several_nodes=True)
