"""Launchers that join and talk, in one process, over a real rendezvous."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import pytest

from hora.errors import ConfigError, LaunchError, RendezvousTimeout
from hora.launch.agent import Agent, from_wire, to_wire
from hora.launch.job_events import FailureSeen, NodeDone, NodeLost, SaveAsked, SaveSeen, Shared, StopAsked
from hora.launch.join import LOST, JobRecord, NodeRecord, found_job, join
from hora.launch.meeting import Line
from hora.launch.nodes import check_reachable
from hora.launch.plan import Layout
from hora.launch.standing import StandingsAsked, StandingsTold
from hora.rendezvous.client import Client
from hora.rendezvous.ended import ended_key
from hora.rendezvous.key import new_key
from hora.rendezvous.server import Server

EVENTS = [
    FailureSeen(1, 3, -9, 'a "report"\nof \u00e4 lines', "details"),
    StandingsAsked(2),
    StandingsTold(1, '[{"rank": 1}]'),
    StopAsked(0, 15),
    SaveAsked(0),
    SaveSeen(0, 2),
    NodeDone(2, saved=True),
    NodeLost(4),
]
Connect = Callable[[], Client]


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    tmp_path.chmod(0o700)
    key = new_key()
    with ExitStack() as stack:
        server = stack.enter_context(Server(f"unix://{tmp_path}/rendezvous.sock", key).start())
        yield lambda: stack.enter_context(Client(server.address, key, name="a launcher", timeout_s=20.0))


def record(num_nodes: int = 2, ranks_per_node: int = 1, hora: str = "1", pid: int = 1) -> NodeRecord:
    return NodeRecord("here", pid, num_nodes, ranks_per_node, hora)


def join_as(connect: Connect, node_rank: int, mine: NodeRecord, num_nodes: int = 2, timeout_s: float = 20.0) -> JobRecord:
    return join(connect(), Layout.even(num_nodes, node_rank, mine.ranks_per_node), mine, timeout_s)


@pytest.mark.parametrize("event", EVENTS)
def test_messages_survive_the_wire(event: Shared) -> None:
    assert from_wire(to_wire(event)) == event


@pytest.mark.parametrize(
    "message", [b"{}", b"[]", b'{"kind": "Shared", "node": 1}', b'{"kind": "NodeLost"}', b'{"kind": "NodeLost", "x": 1}', b"\xff"]
)
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError):
        from_wire(message)


def test_a_launcher_that_is_alone_hears_itself() -> None:
    heard: list[Shared] = []
    Line(heard.append).publish(EVENTS[0])
    assert heard == EVENTS[:1]


def test_ranks_that_have_ended_are_told_at_the_rendezvous(connect: Connect) -> None:
    agent = Agent(connect(), 0, 2, lambda _: None)
    agent.tell_ended(3)
    connect().wait([ended_key(3)], 20.0)
    agent._lost = True  # nobody else would take leave
    agent.close()


def test_all_launchers_hear_everything_in_one_order(connect: Connect) -> None:
    queues: list[SimpleQueue[Shared]] = [SimpleQueue() for _ in range(3)]
    agents = [Agent(connect(), node, 3, queue.put) for node, queue in enumerate(queues)]
    for index in range(20):
        for node, agent in enumerate(agents):
            agent.publish(StopAsked(node, index))
    heard = [[queue.get(timeout=20) for _ in range(60)] for queue in queues]
    assert heard[0] == heard[1] == heard[2]
    for node in range(3):
        assert [event.signum for event in heard[0] if isinstance(event, StopAsked) and event.node == node] == list(range(20))
    close_together(agents)


def close_together(agents: list[Agent]) -> None:
    with ThreadPoolExecutor(len(agents)) as pool:
        list(pool.map(Agent.close, agents))


def test_a_launcher_that_leaves_when_its_node_is_done_is_not_missed(connect: Connect) -> None:
    heard: SimpleQueue[Shared] = SimpleQueue()
    zero, one = Agent(connect(), 0, 2, heard.put), Agent(connect(), 1, 2, lambda _event: None)
    one.publish(NodeDone(1, saved=False))
    one.close()
    zero.publish(NodeDone(0, saved=False))
    assert [heard.get(timeout=20) for _ in range(2)] == [NodeDone(1, saved=False), NodeDone(0, saved=False)]
    zero.close()  # which ends what it hears
    assert heard.empty()


def test_node_zero_stays_until_the_others_have_left(connect: Connect) -> None:
    """They hear from it how the job ended."""
    zero, one = (Agent(connect(), node, 2, lambda _event: None) for node in range(2))
    for node, agent in enumerate((zero, one)):
        agent.publish(NodeDone(node, saved=False))
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(zero.close)
        with pytest.raises(TimeoutError):
            leaving.result(0.5)
        one.close()
        leaving.result(20)


def test_a_launcher_that_leaves_before_is_lost(connect: Connect) -> None:
    heard: SimpleQueue[Shared] = SimpleQueue()
    zero, one = Agent(connect(), 0, 2, heard.put), Agent(connect(), 1, 2, lambda _event: None)
    one.close()
    assert heard.get(timeout=20) == NodeLost(1)
    zero.close()


def test_a_rendezvous_that_is_gone_means_that_node_zero_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    key, heard = new_key(), SimpleQueue[Shared]()
    with Server(f"unix://{tmp_path}/rendezvous.sock", key).start() as server:
        agent = Agent(Client(server.address, key, name="one", timeout_s=20.0), 1, 2, heard.put)
    assert heard.get(timeout=20) == NodeLost(0)
    agent.close()


class Vanished:
    """A client whose server vanishes: every word from then on takes as long as a connection is tried."""

    def __init__(self) -> None:
        self.asked_for_nothing: list[str] = []
        self.closed = self.took_leave = False

    def get(self, key: str, timeout_s: float) -> bytes:
        raise ConnectionError("no route")

    def close(self, *, take_leave: bool) -> None:
        self.closed, self.took_leave = True, take_leave

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.asked_for_nothing.append(name)


def test_who_has_lost_the_rendezvous_leaves_without_a_word() -> None:
    client, heard = Vanished(), SimpleQueue[Shared]()
    agent = Agent(client, 1, 2, heard.put)  # type: ignore[arg-type]
    assert heard.get(timeout=20) == NodeLost(0)
    agent.close()
    assert client.closed
    assert not client.took_leave
    assert client.asked_for_nothing == []


def test_who_has_given_the_server_up_is_lost_to_it(connect: Connect) -> None:
    """The launcher that serves was stopped, did not answer in time, and goes on: its ranks must not wait for those of who has left."""
    heard, gave_up = SimpleQueue[Shared](), threading.Event()
    zero, client = Agent(connect(), 0, 2, heard.put), connect()
    client.set_will(LOST, b"1")
    one = Agent(client, 1, 2, lambda _: gave_up.set())
    one._lose_server(TimeoutError())
    assert gave_up.wait(20)
    one.close()
    assert heard.get(timeout=20) == NodeLost(1)
    zero.publish(NodeDone(0, saved=False))
    zero.close()


def test_nodes_join_when_all_have_come(connect: Connect) -> None:
    found_job(connect(), JobRecord("4f", 4711, record()))
    with ThreadPoolExecutor(2) as pool:
        jobs = list(pool.map(lambda node: join_as(connect, node, record()), range(2)))
    assert jobs == [JobRecord("4f", 4711, record())] * 2


def test_missing_nodes_are_named(connect: Connect) -> None:
    found_job(connect(), JobRecord("4f", 4711, record(num_nodes=4)))
    connect().set("launch/node/2", b"")
    with pytest.raises(RendezvousTimeout, match=r"waited 0.05 s for nodes 1, 3 of 4"):
        join_as(connect, 0, record(num_nodes=4), num_nodes=4, timeout_s=0.05)


def test_who_gave_up_has_given_its_place_back(connect: Connect) -> None:
    found_job(connect(), JobRecord("4f", 4711, record()))
    with pytest.raises(RendezvousTimeout):
        join_as(connect, 1, record(), timeout_s=0.05)
    assert not connect().check(["launch/node/1"])


def test_a_place_is_given_once(connect: Connect) -> None:
    found_job(connect(), JobRecord("4f", 4711, record()))
    claimed = threading.Event()
    client = connect()

    def first() -> JobRecord:
        claimed.set()
        return join(client, Layout.even(2, 1, 1), record(pid=11), 20.0)

    with ThreadPoolExecutor(2) as pool:
        holder = pool.submit(first)
        connect().wait(["launch/node/1"])
        with pytest.raises(
            ConfigError, match="two launchers claim --node-rank 1: process 11 on here, which was first, and process 12 on here"
        ):
            join_as(connect, 1, record(pid=12))
        join_as(connect, 0, record())
        assert holder.result(20).job_id == "4f"


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (record(num_nodes=3), r"--nnodes is 3 on node 1 \(here\) but 2 on node 0 \(here\)"),
        (record(ranks_per_node=4), "--nproc-per-node is 4 on node 1 .* but 1 on node 0"),
        (record(hora="2"), "the version of Hora is 2 on node 1 .* but 1 on node 0"),
        (record(ranks_per_node=4, hora="2"), "--nproc-per-node is 4 .*; the version of Hora is 2"),
    ],
)
def test_what_differs_is_refused_with_both_values(connect: Connect, mine: NodeRecord, message: str) -> None:
    found_job(connect(), JobRecord("4f", 4711, record()))
    with pytest.raises(ConfigError, match=message):
        join_as(connect, 1, mine)
    assert not connect().check(["launch/node/1"])


def test_a_launcher_that_is_refused_again_and_again_does_not_fill_the_screen_of_node_zero(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    found_job(connect(), JobRecord("4f", 4711, record()))
    refused = connect()
    for number in range(120):
        refused.set(f"launch/refused/{number}", b"--nnodes is 3")
    with pytest.raises(RendezvousTimeout):
        join_as(connect, 0, record(), timeout_s=0.05)
    said = [entry.getMessage() for entry in caplog.records if "came and was refused" in entry.getMessage()]
    assert [line.rpartition(": ")[2] for line in said] == [f"{number})" for number in (*range(1, 11), 100)]


def test_another_version_that_says_more_or_less_is_refused_as_that(connect: Connect) -> None:
    connect().set(
        "launch/job", json.dumps({"name": "4f", "node_zero": {"host": "there", "pid": 3, "hora": "2", "num_nodes": 2, "more": 1}}).encode()
    )
    with pytest.raises(ConfigError, match=r"the version of Hora is 1 on node 1 \(here\) but 2 on node 0 \(there\)"):
        join_as(connect, 1, record())


def test_a_launcher_that_is_lost_while_joining_ends_the_wait(connect: Connect) -> None:
    found_job(connect(), JobRecord("4f", 4711, record()))
    connect().set(LOST, b"1")
    with pytest.raises(LaunchError, match="the launcher of node 1 joined and is gone again"):
        join_as(connect, 0, record())


@pytest.mark.parametrize(
    ("name", "address"),
    [("127.0.0.1", "tcp://127.0.0.1:1"), ("localhost", "tcp://[::1]:1"), ("node0", "tcp://10.0.0.1:1"), ("127.0.1.1", "tcp://127.0.1.1:1")],
)
def test_addresses_that_others_reach_are_accepted(name: str, address: str) -> None:
    check_reachable(name, address)


@pytest.mark.parametrize("address", ["tcp://127.0.1.1:1", "tcp://[::1]:1"])
def test_a_host_name_that_leads_to_loopback_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="--master-addr node0 must be an address by which other nodes reach node 0"):
        check_reachable("node0", address)
