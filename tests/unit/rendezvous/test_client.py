import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from hora.errors import LaunchError
from hora.rendezvous import client as client_module
from hora.rendezvous.client import Client
from hora.rendezvous.key import new_key, write_key
from hora.rendezvous.server import Server

Connect = Callable[..., Client]
Until = Callable[[Callable[[], bool]], None]


@contextmanager
def python(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A fresh Python that runs `script`; killed at the end."""
    # Forking beside a thread is what these scripts are about; newer Pythons warn of it.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


CONNECT = """
import os, sys, signal
from hora.rendezvous.client import Client
from hora.rendezvous.key import read_key
from hora.rendezvous.server import Server
address, key = sys.argv[1], read_key(sys.argv[2])
def say(text):
    print(text, flush=True)
"""


@pytest.fixture
def key_file(key: bytes, tmp_path: Path) -> str:
    write_key(tmp_path / "key", key)
    return str(tmp_path / "key")


def test_any_bytes_come_back_as_they_were(client: Client) -> None:
    for value in (b"", b"\x00\xff\n", bytes(range(256)) * 1000):
        client.set("a key with spaces and ü", value)
        assert client.get("a key with spaces and ü") == value


def test_get_waits_until_another_client_sets_the_key(server: Server, connect: Connect) -> None:
    one, other = connect(server), connect(server)
    with ThreadPoolExecutor() as pool:
        value = pool.submit(one.get, "k")
        other.set("k", b"v")
        assert value.result() == b"v"


def test_timeout_names_the_missing_keys_alone(client: Client) -> None:
    client.set("there", b"")
    with pytest.raises(TimeoutError, match=r"^rank 0 waited 0\.1 s at the rendezvous \S+ for what nobody set: missing/1, missing/2$"):
        client.wait(["missing/1", "there", "missing/2"], 0.1)
    with pytest.raises(TimeoutError, match="for what nobody set: k$"):
        client.get("k", timeout_s=0.0)


def test_timeout_lists_a_few_of_many_missing_keys(client: Client) -> None:
    with pytest.raises(TimeoutError, match="k/0, k/1, .*k/7 and 92 more"):
        client.wait([f"k/{index}" for index in range(100)], 0.0)


def test_client_stays_usable_after_a_timeout(client: Client) -> None:
    with pytest.raises(TimeoutError):
        client.get("k", timeout_s=0.0)
    client.set("k", b"v")
    assert client.get("k") == b"v"


def test_counter_counts_every_addition_once(server: Server, connect: Connect) -> None:
    clients = [connect(server), connect(server)]
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda index: clients[index % 2].add("n", 1), range(400)))
    assert sorted(sums) == list(range(1, 401))
    assert clients[0].get("n") == b"400"
    assert clients[0].add("n", -401) == -1


def test_append_compare_set_check_delete_and_num_keys(client: Client) -> None:
    client.append("k", b"a")
    client.append("k", b"b")
    assert client.get("k") == b"ab"
    assert client.compare_set("k", b"wrong", b"c") == b"ab"
    assert client.compare_set("k", b"ab", b"c") == b"c"
    assert client.compare_set("absent", b"wrong", b"c") == b"wrong"
    assert client.compare_set("new", b"", b"c") == b"c"
    assert client.num_keys() == 2
    assert (client.check(["k", "new"]), client.check(["k", "absent"]), client.check([])) == (True, False, True)
    assert (client.delete("k"), client.delete("k")) == (True, False)
    assert client.keys() == ["new"]


def test_requests_and_answers_larger_than_a_message_are_cut(address: str, key: bytes, connect: Connect) -> None:
    with Server(address, key, max_frame_bytes=1024).start() as server:
        client = connect(server)
        items = {f"{index:03}": bytes([index]) * 300 for index in range(100)}
        client.multi_set(items)
        assert client.multi_get(list(items)) == list(items.values())
        assert client.check(list(items))
        client.wait(list(items), 0.0)
        assert client.keys() == list(items)
        assert client.keys("09") == [f"09{digit}" for digit in range(10)]
        with pytest.raises(TimeoutError, match="k/99"):
            client.multi_get([*items, "k/99"], 0.0)


def test_value_larger_than_a_message_is_refused_with_the_limit(client: Client) -> None:
    with pytest.raises(ValueError, match="must fit into 1048576 bytes, but has 2000"):
        client.set("k", bytes(2_000_000))
    with pytest.raises(ValueError, match=r"refused a request of rank 0: the value of 'k' must fit"):
        for _ in range(3):
            client.append("k", bytes(400_000))
    assert len(client.get("k")) == 800_000


def test_nothing_wanted_is_had_at_once(client: Client) -> None:
    client.wait([], 0.0)
    client.multi_set({})
    assert client.multi_get([]) == []


def test_waiting_thread_does_not_hold_up_others(client: Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(client.get, f"k/{index}") for index in range(8)]
        for index in range(8):
            client.set(f"k/{index}", b"%d" % index)
        assert [value.result() for value in waiting] == [b"%d" % index for index in range(8)]


def test_client_may_come_before_the_server(address: str, key: bytes, free_port: int, connect: Connect) -> None:
    address = address if address.startswith("unix") else f"tcp://127.0.0.1:{free_port}"
    with ThreadPoolExecutor() as pool:
        early = pool.submit(connect, address)
        with Server(address, key).start():
            early.result().set("k", b"v")


def test_nobody_there_is_a_connection_error_at_the_deadline(address: str, free_port: int, connect: Connect) -> None:
    address = address if address.startswith("unix") else f"tcp://127.0.0.1:{free_port}"
    begin = time.monotonic()
    with pytest.raises(ConnectionError, match=r"rank 0 found no rendezvous at \S+ within 0\.2 s .*see that the process that serves it"):
        connect(address, timeout_s=0.2)
    assert time.monotonic() - begin < 2.0


def test_a_listener_that_says_nothing_is_given_up_at_the_deadline(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        with pytest.raises(ConnectionError, match="found no rendezvous"):
            connect(f"tcp://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2)
        assert time.monotonic() - begin < 2.0


def test_wrong_key_is_said_with_the_remedy_and_without_the_keys(
    server: Server, key: bytes, caplog: pytest.LogCaptureFixture, until: Until
) -> None:
    wrong = new_key()
    with pytest.raises(LaunchError, match="rank 7 has another key than the rendezvous at .*; give every node the key file") as caught:
        Client(server.address, wrong, name="rank 7", timeout_s=20.0)
    until(lambda: "it has another key" in caplog.text)  # at the server, too
    text = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert not any(secret in text for one in (key, wrong) for secret in (one.hex(), repr(one)))


def test_nothing_that_is_printed_shows_the_key(server: Server, client: Client, key: bytes) -> None:
    shown = f"{server!r} {client!r} {client.address} {server.address}"
    assert key.hex() not in shown
    assert repr(key) not in shown


def test_end_of_the_server_ends_waiting_with_a_connection_error(address: str, key: bytes, connect: Connect, until: Until) -> None:
    server = Server(address, key).start()
    client = connect(server)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.get, "k")
        until(lambda: len(server._waiting) == 1)
        server.close()
        with pytest.raises(
            ConnectionError, match=r"rank 0 lost the rendezvous at .*\(it closed the connection\): the process that serves it"
        ):
            waiting.result()
    with pytest.raises(ConnectionError, match="lost the rendezvous"):
        client.set("k", b"v")


def test_silent_server_is_noticed_at_the_deadline(server: Server, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_GRACE_S", 0.1)
    go_on = threading.Event()
    monkeypatch.setattr(server._table, "apply", lambda *_: go_on.wait(20.0) and [b"ok"])
    try:
        with pytest.raises(TimeoutError, match=r"got no answer from the rendezvous at \S+ within 0\.1 s; the process that serves it hangs"):
            client.get("k", timeout_s=0.0)
    finally:
        go_on.set()


def test_closing_ends_what_other_threads_wait_for(server: Server, client: Client, until: Until) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.get, "k")
        until(lambda: len(server._waiting) == 1)
        client.close()
        with pytest.raises(ConnectionError, match="rank 0 has closed its connection"):
            waiting.result()


def test_closed_client_refuses_everything_but_closing(client: Client) -> None:
    client.close()
    client.close()
    for call in (lambda: client.set("k", b"v"), lambda: client.get("k"), lambda: client.set_will("k", b"v")):
        with pytest.raises(ConnectionError, match="rank 0 has closed its connection"):
            call()


def test_will_is_carried_out_when_its_process_is_killed(server: Server, client: Client, key_file: str) -> None:
    script = f"""{CONNECT}
client = Client(address, key, name='rank 1', timeout_s=20.0)
client.set_will('gone/1', b'killed')
say('ready')
sys.stdin.read()
"""
    with python(script, server.address, key_file) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert not client.check(["gone/1"])
        process.kill()
        assert client.get("gone/1") == b"killed"


def test_will_is_carried_out_although_a_forked_child_lives_on(server: Server, client: Client, key_file: str) -> None:
    script = f"""{CONNECT}
client = Client(address, key, name='rank 1', timeout_s=20.0)
client.set_will('gone/1', b'killed')
if os.fork():
    say(os.getpid())
    signal.pause()
sys.stdin.read()
client.set('child lives', b'')
"""
    with python(script, server.address, key_file) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        os.kill(int(process.stdout.readline()), signal.SIGKILL)
        assert client.get("gone/1") == b"killed"
        process.stdin.close()
        client.wait(["child lives"])
        process.stdin = None


def test_will_is_dropped_when_the_client_takes_leave(server: Server, client: Client, connect: Connect, until: Until) -> None:
    leaving = connect(server)
    leaving.set_will("gone", b"")
    leaving.close()
    until(lambda: len(server._clients) == 1)
    assert not client.check(["gone"])


def test_will_outlasts_the_clients_other_connections(server: Server, client: Client, connect: Connect, until: Until) -> None:
    careful = connect(server)
    careful.set_will("gone", b"")
    for connection in careful._pool._idle:
        connection.sock.shutdown(socket.SHUT_RDWR)
    until(lambda: len(server._clients) == 2)
    assert not client.check(["gone"])


def test_later_will_for_a_key_replaces_the_earlier(server: Server, client: Client, connect: Connect) -> None:
    careful = connect(server)
    careful.set_will("gone", b"first")
    careful.set_will("gone", b"second")
    assert careful._pool._reserved is not None
    careful._pool._reserved.sock.shutdown(socket.SHUT_RDWR)
    assert client.get("gone") == b"second"


def test_forked_child_has_connections_of_its_own(server: Server, client: Client, key_file: str) -> None:
    script = f"""{CONNECT}
client = Client(address, key, name='rank 1', timeout_s=20.0)
def call_often():
    for _ in range(200):
        client.add('n', 1)
child = os.fork()
call_often()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
client.close()
"""
    with python(script, server.address, key_file) as process:
        assert process.wait() == 0
    assert client.get("n") == b"400"


def test_child_forked_while_another_thread_holds_the_pool_does_not_hang(server: Server, client: Client, key_file: str) -> None:
    script = f"""{CONNECT}
client = Client(address, key, name='rank 1', timeout_s=20.0)
with client._pool._lock, client._pool._reserved_lock:
    child = os.fork()
    if not child:
        client.set('k', b'v')
        client.set_will('will', b'')
        client.close()
        os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    with python(script, server.address, key_file) as process:
        assert process.wait(20.0) == 0
    assert client.get("k") == b"v"
