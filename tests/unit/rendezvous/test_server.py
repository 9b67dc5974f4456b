import logging
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from rendezvous_kit import plain_socket

from hora.errors import LaunchError
from hora.rendezvous import server as server_module
from hora.rendezvous.address import parse_address
from hora.rendezvous.client import Client
from hora.rendezvous.key import new_key, write_key
from hora.rendezvous.pool import Connection
from hora.rendezvous.protocol import HELLO_BYTES, MAGIC, ServerSide
from hora.rendezvous.server import Server

Connect = Callable[..., Client]
Until = Callable[[Callable[[], bool]], None]


def closed(sock: socket.socket) -> bool:
    """Whether the server closes this connection (within 20 s)."""
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def test_nothing_but_the_given_address_listens(key: bytes, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)

    def listening() -> set[tuple[str, int]]:
        return {entry.laddr for entry in psutil.Process().net_connections("inet") if entry.status == psutil.CONN_LISTEN}

    before = listening()
    with Server(f"unix://{tmp_path}/s", key).start():
        assert listening() == before
    with Server("tcp://127.0.0.1:0", key).start() as server:
        ((host, port),) = listening() - before
        assert server.address == f"tcp://{host}:{port}"
        assert host == "127.0.0.1"
    assert listening() == before


def test_a_client_that_waits_for_years_ends_nobody_elses_wait(address: str, key: bytes, until: Until) -> None:
    with Server(address, key).start() as server, Client(server.address, key, name="rank 0", timeout_s=20.0) as patient:
        waiting = threading.Thread(target=lambda: patient.get("late", timeout_s=1e9))
        waiting.start()
        until(lambda: bool(server._waiting) or not waiting.is_alive())
        with Client(server.address, key, name="rank 1", timeout_s=20.0) as other:
            other.set("late", b"now")
        waiting.join(20.0)
        assert not waiting.is_alive()


def test_closing_leaves_no_thread_no_socket_and_no_file(address: str, key: bytes, tmp_path: Path) -> None:
    threads, files = threading.active_count(), psutil.Process().num_fds()
    server = Server(address, key).start()
    with Client(server.address, key, name="rank 0", timeout_s=20.0), plain_socket(server):
        server.close()
        server.close()
    assert (threading.active_count(), psutil.Process().num_fds(), os.listdir(tmp_path)) == (threads, files, [])


def test_the_process_that_serves_can_set_keys_itself(address: str, key: bytes) -> None:
    with Server(address, key).start() as server, Client(server.address, key, name="rank 0", timeout_s=20.0) as client:
        for number in range(100):
            server.note(f"ended/{number}")
        client.wait([f"ended/{number}" for number in range(100)])
        assert client.get("ended/99") == b""
    server.note("late")


def test_server_that_cannot_start_leaves_nothing_behind(key: bytes, tmp_path: Path) -> None:
    threads, files = threading.active_count(), psutil.Process().num_fds()
    (tmp_path / "s").touch()
    server = Server(f"unix://{tmp_path}/s", key)
    with pytest.raises(LaunchError):
        server.start()
    server.close()
    assert (threading.active_count(), psutil.Process().num_fds(), os.listdir(tmp_path)) == (threads, files, ["s"])


def test_same_address_can_be_served_again_at_once(address: str, key: bytes, connect: Connect) -> None:
    with Server(address, key).start() as first:
        connect(first).set("k", b"v")
    with Server(first.address, key).start() as second:
        assert not connect(second).check(["k"])


def test_stranger_has_until_its_deadline(address: str, key: bytes, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    with Server(address, key, handshake_timeout_s=0.5).start() as server, plain_socket(server) as silent, plain_socket(server) as halfway:
        begin = time.monotonic()
        halfway.sendall(MAGIC + bytes(HELLO_BYTES - len(MAGIC)))
        assert halfway.recv(1) == MAGIC[:1]
        assert closed(silent)
        assert time.monotonic() - begin < 5.0
        halfway.settimeout(20.0)
        while halfway.recv(4096):
            pass
        connect(server).set("k", b"v")
    who = "a stranger" if address.startswith("unix:") else "a stranger at 127.0.0.1"
    assert f"the rendezvous refused {who}: it did not finish the handshake in time (refused so far: 1)" in caplog.text


def test_who_has_another_key_is_said_though_others_were_refused_before_and_a_flood_is_not(
    address: str, key: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusals() -> list[str]:
        return [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]

    with Server(address, key).start() as server:
        for _ in range(2):
            with plain_socket(server) as stranger:
                stranger.sendall(b"\x1b[31m" + bytes(HELLO_BYTES))
                assert closed(stranger)
        with pytest.raises(LaunchError, match="another key"):
            Client(server.address, new_key(), name="rank 1", timeout_s=20.0)
        with plain_socket(server) as stranger:
            stranger.sendall(bytes(HELLO_BYTES))
            assert closed(stranger)
        speech, other_key = refusals()
        assert "it does not speak this version" in speech
        assert "it has another key" in other_key

        monkeypatch.setattr(server_module, "_KINDS_OF_REFUSAL", 2)  # as after many kinds
        caplog.clear()
        for number in range(25):
            sock, peer = socket.socketpair()
            connection = server_module._Connection(sock, ServerSide(key, max_frame_bytes=1000), 0.0, f"10.0.0.{number}")
            monkeypatch.setattr(server, "_drop", lambda _: None)
            server._refuse(connection, "it has another key")
            sock.close()
            peer.close()
        assert [line.rpartition(": ")[2] for line in refusals()] == ["1)", "10)"]
        monkeypatch.undo()


def test_proven_client_may_be_silent_for_longer(address: str, key: bytes, connect: Connect) -> None:
    with Server(address, key, handshake_timeout_s=0.5).start() as server:
        client = connect(server)
        with plain_socket(server) as silent:
            assert closed(silent)
        assert client.num_keys() == 0


def test_oldest_stranger_makes_room_for_newcomers(address: str, key: bytes, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_STRANGERS", 4)
    with Server(address, key, handshake_timeout_s=1000.0).start() as server, ExitStack() as crowd:
        strangers = [crowd.enter_context(plain_socket(server)) for _ in range(5)]
        assert closed(strangers[0])
        connect(server).set("k", b"v")
        assert closed(strangers[1])


def test_client_that_does_not_say_who_it_is_is_refused(address: str, key: bytes) -> None:
    with Server(address, key, handshake_timeout_s=1000.0).start() as server:
        connection = Connection(parse_address(server.address), key, 20.0)
        with connection.sock, pytest.raises(ConnectionError):
            connection.ask((b"num_keys",), 20.0)


def test_connection_over_the_limit_is_told_so(address: str, key: bytes, connect: Connect, until: Until) -> None:
    with Server(address, key, max_connections=1).start() as server:
        first = connect(server)
        with pytest.raises(LaunchError, match="refused rank 9: it has the 1 connections already that it allows"):
            connect(server, "rank 9")
        first.set("k", b"v")
        first.close()
        until(lambda: not server._clients)
        connect(server).set("k", b"v")


def test_waiter_of_a_broken_connection_is_forgotten(server: Server, connect: Connect, until: Until) -> None:
    gone = connect(server)
    with pytest.raises(ConnectionError), gone._pool._lend() as connection:
        connection.say((b"wait", b"1000", b"k"), 20.0)
        until(lambda: len(server._waiting) == 1)
        raise ConnectionError
    until(lambda: not server._waiting and not server._table._waiting and not server._table._waiters)
    connect(server).set("k", b"v")


def test_client_that_speaks_out_of_turn_is_refused_and_others_are_not(server: Server, connect: Connect) -> None:
    rude, polite = connect(server), connect(server)
    with pytest.raises(ConnectionError), rude._pool._lend() as connection:
        connection.say((b"wait", b"1000", b"k"), 20.0)
        connection.ask((b"num_keys",), 20.0)
    polite.set("k", b"v")


def test_slow_reader_does_not_hold_up_others(address: str, key: bytes, connect: Connect, until: Until) -> None:
    value = bytes(1 << 24)  # more than the kernel keeps for a socket
    with Server(address, key, max_frame_bytes=1 << 25).start() as server:
        slow, quick = connect(server), connect(server)
        quick.set("k", value)
        with slow._pool._lend() as connection:
            connection.say((b"get", b"1000", b"k"), 20.0)
            until(lambda: any(one.side.outgoing for one in list(server._clients)))
            assert quick.get("k") == value
            assert connection._receive(1)


def test_failure_on_one_request_is_logged_and_spares_the_others(
    server: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unlucky, lucky = connect(server, "rank 1"), connect(server)
    with monkeypatch.context() as patch:
        patch.setattr(server._table, "apply", lambda *_: 1 / 0)
        with pytest.raises(ConnectionError):
            unlucky.num_keys()
    assert "failed on a request of rank 1 and closes its connection" in caplog.text
    assert lucky.num_keys() == 0


def test_refusals_are_logged_ever_more_rarely(server: Server, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for _ in range(30):
            with plain_socket(server) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: x\r\n\r\n")
                assert closed(sock)
    assert len(caplog.records) == 2


HOST = """
import resource, sys, threading
from hora.rendezvous.key import read_key
from hora.rendezvous.server import Server
with Server(sys.argv[1], read_key(sys.argv[2])).start() as server:
    print(server.address, flush=True)
    {meanwhile}
"""


def test_server_answers_while_its_process_is_busy(address: str, key: bytes, tmp_path: Path, connect: Connect) -> None:
    write_key(tmp_path / "key", key)
    busy = HOST.format(
        meanwhile="stop = threading.Thread(target=sys.stdin.read)\n    stop.start()\n    while stop.is_alive(): sum(range(1000))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", busy, address, tmp_path / "key"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as host:
        assert host.stdin is not None
        assert host.stdout is not None
        client = connect(host.stdout.readline().strip())
        begin = time.monotonic()
        for _ in range(20):
            client.add("n", 1)
        per_call_s = (time.monotonic() - begin) / 20
        host.stdin.close()
    assert host.returncode == 0
    assert per_call_s < 0.2


def test_server_without_file_descriptors_left_goes_on(address: str, key: bytes, tmp_path: Path, connect: Connect) -> None:
    write_key(tmp_path / "key", key)
    tight = HOST.format(
        meanwhile=f"resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n    print({'ready'!r}, flush=True)\n    sys.stdin.read()"
    )
    with (
        subprocess.Popen(
            [sys.executable, "-c", tight, address, tmp_path / "key"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as host,
        ExitStack() as crowd,
    ):
        assert host.stdin is not None
        assert host.stdout is not None
        where = host.stdout.readline().strip()
        client = connect(where)
        host.stdout.readline()
        for _ in range(100):
            crowd.enter_context(plain_socket(Server(where, key)))
        client.set("k", b"v")
        connect(where).set("k", b"w")
        assert client.get("k") == b"w"
        cpu_s = sum(psutil.Process(host.pid).cpu_times()[:2])
        clients = []
        with pytest.raises(ConnectionError):
            for _ in range(40):
                clients.append(connect(where, timeout_s=0.5))  # noqa: PERF401  # those made before the error count
        clients[0].set("k", b"x")
        assert sum(psutil.Process(host.pid).cpu_times()[:2]) - cpu_s < 0.25, "it must not spin while it cannot accept"
        client.close()
        for one in clients:
            one.close()
        connect(where).set("k", b"y")
        host.stdin.close()
    assert host.returncode == 0


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system cannot bound how long a vanished peer is waited for")
def test_peer_whose_machine_vanished_is_given_up_on_both_sides(key: bytes, connect: Connect) -> None:
    with Server("tcp://127.0.0.1:0", key).start() as server, connect(server)._pool._lend() as connection:
        (theirs,) = (one.sock for one in server._clients)
        for sock in (connection.sock, theirs):
            options = {
                name: sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
            }
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert options["TCP_KEEPIDLE"] + options["TCP_KEEPINTVL"] * options["TCP_KEEPCNT"] == 4
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 4_000


def test_thousand_waiting_clients_are_served(server: Server, connect: Connect) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard >= 1200
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    clients = [connect(server) for _ in range(250)]
    with ExitStack() as lent:
        connections = [lent.enter_context(client._pool._lend()) for client in clients]
        for connection in connections:
            connection.say((b"wait", b"1000", b"go"), 20.0)
        connect(server).set("go", b"")
        for connection in connections:
            assert list(connection.channel.feed(connection._receive(4096)))
