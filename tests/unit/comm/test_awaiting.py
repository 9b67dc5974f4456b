"""A process that waits for ranks that nobody sees to ends when it is asked to, and not at its deadline."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import pytest
import torch.distributed as dist

import hora
from hora.comm import meeting, session
from hora.comm.awaiting import awaiting_others
from hora.comm.deadline import Deadline
from hora.comm.meeting import join_store, keep_store
from hora.errors import LaunchError
from hora.rendezvous.client import Client
from hora.rendezvous.key import new_key, user_key
from hora.rendezvous.server import Server
from hora.topology import Topology
from hora.train.preemption import Preemption

LONG_S = 60.0


@pytest.fixture(autouse=True)
def as_if_started_by_hand(monkeypatch, tmp_path):
    monkeypatch.setenv("HORA_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(session, "_sessions_begun", 0)  # whatever other tests of this process have begun
    for name in ("HORA_RENDEZVOUS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def end_of_waiting(signum: signal.Signals, rank: int, come: Callable[[int], None]) -> tuple[int, float]:
    """The exit code of rank `rank` of 3 that gets a signal once `come(port)` has seen it wait, and how many seconds after."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    sent_s = []
    over = threading.Event()

    def send() -> None:
        come(port)
        sent_s.append(time.monotonic())
        if not over.is_set():  # else nobody would note it, and it would end the tests
            os.kill(os.getpid(), signum)

    sender = threading.Thread(target=send)
    with Preemption(), pytest.raises(SystemExit) as ended:
        sender.start()
        try:
            hora.init(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3, device="cpu", timeout_s=LONG_S)
        finally:
            over.set()
    ended_s = time.monotonic()
    sender.join()
    assert not hora.is_initialized()
    return ended.value.code, ended_s - sent_s[0]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_rank_0_ends_when_it_is_asked_to_and_waits_for_nobody_who_has_come(signum, monkeypatch, caplog):
    monkeypatch.setattr(meeting, "_GOODBYE_TIMEOUT_S", LONG_S)
    with ExitStack() as release:

        def come(port: int) -> None:
            client = Client(f"tcp://127.0.0.1:{port}", user_key(), name="rank 1", timeout_s=LONG_S)
            release.enter_context(client).set("came/1.test", b"")

        code, seconds = end_of_waiting(signum, 0, come)
    assert code == 128 + signum
    assert seconds < LONG_S / 3
    assert f"rank 0 ends, as {signum.name} asks for, before all ranks have come" in caplog.text


def test_signal_that_comes_while_the_store_is_opened_leaves_no_thread(monkeypatch):
    class Signalled(Server):
        def start(self) -> "Server":
            super().start()
            signal.raise_signal(signal.SIGTERM)
            begun.append(self)
            return self

    begun = []
    monkeypatch.setattr(meeting, "Server", Signalled)
    with Preemption(), pytest.raises(SystemExit), awaiting_others(0), ExitStack() as release:
        keep_store("tcp://127.0.0.1:0", new_key(), Deadline(LONG_S), release)
    assert begun, "it has ended while the server was being opened"
    assert "hora-rendezvous" not in [thread.name for thread in threading.enumerate()]


def test_signal_that_comes_while_the_store_cannot_be_opened_is_heeded(monkeypatch):
    """In a cluster whose names are still being made, looking them up takes most of the time."""

    class Unnamed(Server):
        def start(self) -> "Server":
            signal.raise_signal(signal.SIGTERM)
            raise LaunchError("there is no such name") from socket.gaierror()

    monkeypatch.setattr(meeting, "Server", Unnamed)
    with Preemption(), pytest.raises(SystemExit), awaiting_others(0), ExitStack() as release:
        keep_store("tcp://127.0.0.1:0", new_key(), Deadline(LONG_S), release)


def test_rank_that_looks_for_rank_0_ends_when_it_is_asked_to():
    with ExitStack() as release:

        def greet(port: int) -> None:
            server = release.enter_context(socket.create_server(("127.0.0.1", port)))
            # Until it speaks it may be just making its socket, which nobody would close when the signal comes.
            release.enter_context(server.accept()[0]).recv(1)

        code, seconds = end_of_waiting(signal.SIGTERM, 1, greet)
    assert code == 128 + signal.SIGTERM
    assert seconds < LONG_S / 3


def test_signal_that_was_noted_before_the_waiting_began_is_heeded_too():
    with Preemption():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit), awaiting_others(0):
            pass
    with awaiting_others(0):  # one that was noted in a block that has ended says nothing any more
        pass


def test_signal_that_comes_after_the_waiting_is_noted_and_no_more():
    with Preemption() as preemption:
        with awaiting_others(0):
            pass
        signal.raise_signal(signal.SIGTERM)
        assert preemption.requested


@pytest.mark.parametrize(
    ("source", "world_size", "by_hand"),
    [("env", 2, True), ("tcp", 2, True), ("file", 2, True), ("torch.distributed", 2, True), ("env", 1, False), ("alone", 1, False)]
    + [(source, 2, False) for source in ("hora", "torchrun", "slurm", "openmpi", "mpich")],
)
def test_ranks_that_a_launcher_has_started_are_its_business(source, world_size, by_hand):
    assert Topology(world_size=world_size, source=source).started_by_hand is by_hand


@pytest.mark.parametrize(("group", "ordinal"), [(False, 0), (True, 0), (False, 1)])
def test_ranks_that_have_met_before_may_have_something_to_save(group, ordinal, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: group)
    met = group or ordinal > 0
    with Preemption() as preemption:
        signal.raise_signal(signal.SIGTERM)
        with (
            nullcontext() if met else pytest.raises(SystemExit),
            session._waiting_for_others(Topology(world_size=2, source="env"), ordinal),
        ):
            pass
        assert preemption.requested


def test_rank_that_is_interrupted_tells_rank_0_by_its_will_and_does_not_look_for_it(monkeypatch):
    """Rank 0 may be gone by then, and would be looked for until the deadline."""
    monkeypatch.setattr(meeting, "_say_goodbye", lambda *_: pytest.fail("it looks for rank 0"))
    key = new_key()
    with ExitStack() as kept:
        _, address = keep_store("tcp://127.0.0.1:0", key, Deadline(LONG_S), kept)
        with pytest.raises(KeyboardInterrupt), ExitStack() as release:
            join_store(address, key, 1, Deadline(LONG_S), release)
            raise KeyboardInterrupt
        with Client(address, key, name="test", timeout_s=LONG_S) as client:
            (came,) = client.keys("came/")
            assert client.get(came.replace("came/", "bye/")) == b"lost"
