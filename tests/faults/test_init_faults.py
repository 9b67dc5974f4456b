"""A job that cannot come together ends in time, and says why; one that can leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import hora
from hora.comm.interfaces import interface_of
from hora.errors import CollectiveMismatch, ConfigError, LaunchError, PeerLost, RendezvousTimeout
from hora.testing import run_ranks, tell


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def joining(rank: int, world_size: int, method: str, timeout_s: float = 20.0) -> list:
    """Joins; what went wrong, and after how long."""
    begun = time.monotonic()
    try:
        hora.init(init_method=method, rank=rank, world_size=world_size, device="cpu", timeout_s=timeout_s)
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - begun]
    hora.barrier()
    hora.shutdown()
    return ["joined", "", time.monotonic() - begun]


def body_joins(places: list, method: str, timeout_s: float = 20.0, together: str | None = None) -> list:
    """Takes the place that `places` has for this process; where `together` is a directory, when all others are about to take theirs."""
    number = int(os.environ["NUMBER"])
    rank, world_size = places[number]
    if together is not None:
        Path(together, str(number)).touch()
        while len(os.listdir(together)) < len(places):
            time.sleep(0.01)
    return joining(rank, world_size, method, timeout_s)


@pytest.fixture
def join(spawn_ranks, tmp_path_factory):
    """Has processes take places (rank, world size), all at one time; what became of each."""

    def join_all(*places: tuple[int, int], method: str, environ: dict[str, str] | None = None, **arguments) -> list[list]:
        arguments |= {"places": places, "method": method, "together": str(tmp_path_factory.mktemp("together"))}
        groups = [
            spawn_ranks(1, body_joins, join=False, environ={"NUMBER": str(number)} | (environ or {}), **arguments)
            for number in range(len(places))
        ]
        outcomes = [group.wait(30.0)[0] for group in groups]
        assert [outcome.kind for outcome in outcomes] == ["passed"] * len(places), outcomes
        return [outcome.result for outcome in outcomes]

    return join_all


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_missing_ranks_are_named_at_the_deadline(join, scheme, tmp_path):
    method = free_address() if scheme == "tcp" else f"file://{tmp_path / 'store'}"
    for rank, (kind, text, seconds) in zip((0, 1), join((0, 4), (1, 4), method=method, timeout_s=1.0), strict=True):
        assert kind == RendezvousTimeout.__name__
        assert f"rank {rank} waited 1.0 s for ranks 2 and 3 of 4; start the missing ranks" in text
        assert seconds < 3.0


def test_rank_0_that_does_not_come_is_told_by_its_address(join):
    method = free_address()
    ((kind, text, seconds),) = join((1, 2), method=method, timeout_s=1.0)
    assert kind == RendezvousTimeout.__name__
    assert f"rank 1 found no rendezvous at {method}" in text
    assert seconds < 3.0


def test_ranks_that_came_too_late_can_be_joined_by_a_second_try(join, tmp_path):
    method = f"file://{tmp_path / 'store'}"
    ((kind, _, _),) = join((0, 2), method=method, timeout_s=0.5)
    assert kind == RendezvousTimeout.__name__
    assert [kind for kind, _, _ in join((0, 2), (1, 2), method=method)] == ["joined", "joined"]


def test_rank_that_comes_twice_is_refused_to_all(join):
    for kind, text, seconds in join((0, 3), (1, 3), (1, 3), method=free_address()):
        assert kind == ConfigError.__name__
        assert "two processes came as rank 1 of 3" in text
        assert seconds < 10.0


def test_world_sizes_that_differ_are_told_with_the_ranks(join):
    for kind, text, _ in join((0, 2), (1, 3), method=free_address()):
        assert kind == CollectiveMismatch.__name__
        assert "world_size is" in text


def test_file_of_an_earlier_job_is_refused_with_what_to_do(spawn_ranks, join, tmp_path):
    path = tmp_path / "store"
    fault = {"HORA_FAULT": "rank=0,point=init.joined,act=SIGKILL;rank=1,point=init.joined,act=SIGKILL", "NUMBER": "0"}
    killed = [
        spawn_ranks(1, body_joins, join=False, environ=fault | {"NUMBER": str(rank)}, places=[(0, 2), (1, 2)], method=f"file://{path}")
        for rank in range(2)
    ]
    assert [ranks.wait()[0].text for ranks in killed] == ["killed by SIGKILL"] * 2
    for kind, text, _ in join((0, 2), (1, 2), method=f"file://{path}"):
        assert kind == ConfigError.__name__
        assert f"delete {path} if an earlier job left it" in text
    path.unlink()
    assert [kind for kind, _, _ in join((0, 2), (1, 2), method=f"file://{path}")] == ["joined", "joined"]


@pytest.mark.parametrize("content", ["a text of mine\n" * 100, None], ids=["text", "directory"])
def test_file_that_is_something_else_is_refused_and_stays_as_it_is(join, tmp_path, content):
    """Torch would read in it for ever."""
    path = tmp_path / "mine"
    path.mkdir() if content is None else path.write_text(content)
    ((kind, text, _),) = join((0, 2), method=f"file://{path}")
    assert kind == ConfigError.__name__
    assert "must name a file that does not exist yet" in text
    assert content is None or path.read_text() == content


@pytest.mark.parametrize("linked", [False, True])
def test_file_in_no_directory_is_refused(join, tmp_path, linked):
    path = tmp_path / "absent" / "store"
    if linked:
        (tmp_path / "link").symlink_to(path)
    ((kind, text, _),) = join((0, 2), method=f"file://{tmp_path / 'link' if linked else path}")
    assert kind == ConfigError.__name__
    assert f"{tmp_path / 'absent'} does not" in text


def test_file_of_a_later_session_of_an_earlier_job_is_refused_before_the_first(join, tmp_path):
    (tmp_path / "store.1").touch()
    ((kind, text, _),) = join((0, 2), method=f"file://{tmp_path / 'store'}")
    assert kind == ConfigError.__name__
    assert f"{tmp_path / 'store.1'}, in which the next session will meet, must not exist yet" in text


def test_other_users_of_the_machine_cannot_join(spawn_ranks, tmp_path):
    method, together = free_address(), tmp_path / "together"
    together.mkdir()
    groups = [
        spawn_ranks(
            1,
            body_joins,
            join=False,
            environ={"NUMBER": str(rank), "HORA_STATE_DIR": str(tmp_path / f"user{rank}")},
            places=[(0, 2), (1, 2)],
            method=method,
            timeout_s=2.0,
            together=str(together),
        )
        for rank in range(2)
    ]
    host, stranger = (group.wait()[0].result for group in groups)
    assert stranger[0] == LaunchError.__name__
    assert "their keys differ" in stranger[1]
    assert host[0] == RendezvousTimeout.__name__


def test_address_in_use_is_told(join):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ((kind, text, _),) = join((0, 2), method=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    assert kind == LaunchError.__name__
    assert "in use" in text


def test_rank_that_dies_while_the_others_connect_is_an_error_in_time(spawn_ranks, tmp_path):
    method = free_address()
    groups = [
        spawn_ranks(
            1,
            body_joins,
            join=False,
            environ={"NUMBER": str(rank), "HORA_FAULT": "rank=1,point=init.met,act=SIGKILL"},
            places=[(0, 2), (1, 2)],
            method=method,
            timeout_s=3.0,
            together=str(tmp_path),
        )
        for rank in range(2)
    ]
    survivor, dead = (group.wait()[0] for group in groups)
    assert dead.text == "killed by SIGKILL"
    kind, text, seconds = survivor.result
    assert kind == PeerLost.__name__
    assert "met all 2 ranks but could not connect" in text
    assert seconds < 6.0


def body_lists_listeners() -> list[str]:
    hora.barrier()
    # Without it Gloo listens wherever the host's name leads, which on this host may be loopback by chance.
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface_of("127.0.0.1")
    return [connection.laddr.ip for connection in psutil.Process().net_connections() if connection.status == psutil.CONN_LISTEN]


def test_ranks_that_share_memory_listen_nowhere(spawn_ranks):
    assert [outcome.result for outcome in spawn_ranks(2, body_lists_listeners, init={"backend": "shm"}).wait()] == [[], []]


def test_ranks_of_one_node_listen_on_loopback_alone(spawn_ranks):
    outcomes = spawn_ranks(2, body_lists_listeners, init={"init_method": free_address(), "backend": "gloo"}).wait()
    for outcome in outcomes:
        assert outcome.result
        assert set(outcome.result) == {"127.0.0.1"}


def body_joins_three_times(method: str) -> list[float]:
    totals = []
    rank, world_size = int(os.environ["NUMBER"]), 3
    for _ in range(3):
        hora.init(init_method=method, rank=rank, world_size=world_size, device="cpu", timeout_s=20.0)
        totals.append(hora.all_reduce(torch.ones(1)).item())
        hora.shutdown()
    return totals


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_ranks_can_leave_and_join_again(spawn_ranks, scheme, tmp_path):
    method = free_address() if scheme == "tcp" else f"file://{tmp_path / 'store'}"
    groups = [spawn_ranks(1, body_joins_three_times, join=False, environ={"NUMBER": str(rank)}, method=method) for rank in range(3)]
    assert [group.wait()[0].result for group in groups] == [[3.0, 3.0, 3.0]] * 3


def body_joins_twice(method: str) -> list[list[str]]:
    seen = []
    for _ in range(2):
        hora.init(init_method=method, rank=int(os.environ["NUMBER"]), world_size=2, device="cpu", timeout_s=20.0)
        seen.append(os.listdir(os.path.dirname(method.removeprefix("file://"))))
        hora.barrier()
        hora.shutdown()
    return seen


def test_each_session_meets_in_a_file_of_its_own(spawn_ranks, tmp_path):
    """The last rank to leave a session deletes its file, in which another may have begun the next."""
    groups = [
        spawn_ranks(1, body_joins_twice, join=False, environ={"NUMBER": str(rank)}, method=f"file://{tmp_path / 'store'}")
        for rank in range(2)
    ]
    for group in groups:
        first, second = group.wait()[0].result
        assert first == ["store"]
        assert set(second) - {"store"} == {"store.1"}
    assert os.listdir(tmp_path) == []


def body_leaves_at_its_own_time() -> float:
    """Rank 0, which keeps the store, leaves at once; rank 1 still uses it."""
    store = hora.session().store
    if hora.rank() == 0:
        begun = time.monotonic()
        store.set("leaving", "")
        hora.shutdown()
        return time.monotonic() - begun
    store.wait(["leaving"])
    threading.Event().wait(1.0)
    store.set("late", "word")
    assert store.get("late") == b"word"
    hora.shutdown()
    return 0.0


def test_store_stays_until_the_last_rank_has_left(spawn_ranks):
    outcomes = spawn_ranks(2, body_leaves_at_its_own_time, init={"init_method": free_address()}).wait()
    assert [outcome.kind for outcome in outcomes] == ["passed", "passed"], outcomes
    assert outcomes[0].result > 0.8


def body_leaves_after_a_death() -> float:
    tell("joined")
    if hora.rank() == 1:
        threading.Event().wait()
    while psutil.pid_exists(hora.session().records[1].pid):
        threading.Event().wait(0.01)
    begun = time.monotonic()
    hora.shutdown()
    return time.monotonic() - begun


def test_dead_rank_does_not_hold_up_the_others_when_they_leave(spawn_ranks):
    ranks = spawn_ranks(2, body_leaves_after_a_death, init={"init_method": free_address()})
    ranks.await_event(1, "joined")
    ranks.signal(1, signal.SIGKILL)
    survivor, _ = ranks.wait()
    assert survivor.kind == "passed", survivor
    assert survivor.result < 2.0


SCRIPT = """
import sys, torch, hora
rank, world_size, method, end = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
session = hora.init(init_method=method, rank=rank, world_size=world_size, device="cpu", timeout_s=30.0)
total = hora.all_reduce(torch.ones(4), async_op=True).wait()
if end == "raise":
    raise SystemExit(7)
"""


@pytest.mark.parametrize(("end", "code"), [("nothing", 0), ("raise", 7)])
def test_script_that_just_ends_exits_cleanly_and_says_nothing(end, code, tmp_path):
    script, method = tmp_path / "script.py", free_address()
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "error", str(script)]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", method, end], stderr=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path)
        for rank in (0, 1)
    ]
    results = [(*rank.communicate(timeout=60), rank.returncode) for rank in ranks]
    assert results == [(b"", b"", code)] * 2


def test_script_alone_that_just_ends_exits_cleanly_and_says_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import torch, hora\nhora.init(device='cpu')\nhora.all_reduce(torch.ones(4))\n")
    result = subprocess.run([sys.executable, "-W", "error", str(script)], capture_output=True, timeout=60, cwd=tmp_path, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


@run_ranks(2)
def test_synchronous_session_ends_with_its_group():
    session = hora.session()
    hora.shutdown()
    assert not torch.distributed.is_initialized()
    with pytest.raises(hora.errors.HoraError, match="no store any more"):
        _ = session.store
