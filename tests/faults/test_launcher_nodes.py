"""Two launchers as two nodes on loopback: what befalls one of them, or one of its ranks, ends both alike."""

import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from launcher_kit import PROMISED_S, Job, Start, kill

from hora.launch.sinks import RankLog

WAITING = "tell('ready', os.getpid())\nwait_forever()\n"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def node(start: Start) -> Callable[..., Job]:
    """`node(node_rank, body, *flags)` starts the launcher of one of two nodes with one rank each."""
    port = str(free_port())

    def start_node(node_rank: int, body: str, *flags: str, nnodes: int = 2, **environ: str) -> Job:
        layout = ("--nnodes", str(nnodes), "--node-rank", str(node_rank), "--master-addr", "127.0.0.1", "--master-port", port)
        return start(body, *layout, *flags, ranks=0, **environ)

    return start_node


Node = Callable[..., Job]


def await_listener(job: Job) -> None:
    """Returns when this launcher can be reached by others."""
    launcher = psutil.Process(job.pid)
    while not any(connection.status == psutil.CONN_LISTEN for connection in launcher.net_connections("tcp")):
        assert job.process.poll() is None, job.err


def both(node: Node, body: str, *flags: str) -> tuple[list[Job], list[int]]:
    """Two nodes whose ranks are running, and those ranks' processes."""
    jobs = [node(0, body, *flags), node(1, body, *flags)]
    return jobs, [job.expect("ready", 1)[rank][0] for rank, job in enumerate(jobs)]


def gone(jobs: list[Job], pids: list[int]) -> float:
    return max(job.gone_after(pids) for job in jobs)


def test_ranks_of_all_nodes_know_their_places(node: Node, tmp_path: Path) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "HORA_NUM_NODES"]
    body = f"import json\njson.dump([os.environ[n] for n in {names} + ['MASTER_PORT', 'HORA_JOB_ID']], open({str(tmp_path)!r} + f'/{{RANK}}', 'w'))\n"
    jobs = [node(0, body, "--nproc-per-node", "2"), node(1, body, "-np", "4")]
    assert [job.wait() for job in jobs] == [0, 0]
    places = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert [place[:8] for place in places] == [
        [str(rank), "4", str(rank % 2), "2", str(rank // 2), str(rank // 2), "127.0.0.1", "2"] for rank in range(4)
    ]
    assert len({tuple(place[8:]) for place in places}) == 1


def test_ranks_of_all_nodes_share_one_rendezvous(node: Node) -> None:
    body = (
        "from hora.rendezvous.client import Client\nfrom hora.rendezvous.key import read_key\n"
        "client = Client(os.environ['HORA_RENDEZVOUS'], read_key(os.environ['HORA_KEY_FILE']), name='rank', timeout_s=30)\n"
        "client.set(f'from/{RANK}', b'')\nclient.wait([f'from/{1 - RANK}'])\nclient.close()\n"
    )
    jobs = [node(0, body), node(1, body)]
    assert [job.wait() for job in jobs] == [0, 0]


def test_a_rank_that_fails_on_one_node_ends_both_within_a_second(node: Node) -> None:
    jobs, pids = both(node, WAITING)
    kill(pids[1])
    assert gone(jobs, pids) < PROMISED_S
    assert [job.wait() for job in jobs] == [137, 137]
    for job in jobs:
        assert "rank 1 failed" in job.err
        assert f"process {pids[1]}" in job.err


def test_a_failure_on_node_zero_reaches_the_other(node: Node) -> None:
    jobs, pids = both(node, "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(33))\n" + WAITING)
    kill(jobs[0].pid, signal.SIGUSR1)
    assert gone(jobs, pids) < PROMISED_S
    assert [job.wait() for job in jobs] == [33, 33]


def test_a_lost_peer_on_one_node_does_not_hide_the_cause_on_the_other(node: Node) -> None:
    body = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])\ntell('ready', os.getpid())\nsignal.sigwait([signal.SIGUSR2])\n"
        "if RANK == 0:\n    raise ConnectionError('Connection closed by peer')\n"
        "sys.exit(9)\n"
    )
    jobs, pids = both(node, body)
    kill(jobs[0].pid, signal.SIGUSR2)
    while psutil.pid_exists(pids[0]):
        pass
    kill(jobs[1].pid, signal.SIGUSR2)
    gone(jobs, pids)
    assert [job.wait() for job in jobs] == [9, 9]
    for job in jobs:
        assert "rank 1 failed" in job.err
        assert "rank 0 failed" not in job.err


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_launcher_ends_the_other_node_within_a_second(node: Node, victim: int) -> None:
    jobs, pids = both(node, WAITING)
    survivor = jobs[1 - victim]
    kill(jobs[victim].pid)
    assert jobs[victim].gone_after([pids[victim]]) + survivor.gone_after([pids[1 - victim]]) < PROMISED_S
    assert survivor.wait() == 1
    assert f"the launcher of node {victim} is gone" in survivor.err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_one_launcher_ends_both_alike(node: Node, signum: signal.Signals, code: int) -> None:
    jobs, pids = both(node, WAITING)
    kill(jobs[1].pid, signum)
    assert gone(jobs, pids) < PROMISED_S
    assert [job.wait() for job in jobs] == [code, code]
    for job in jobs:
        assert "failed" not in job.err


def test_a_second_ctrl_c_on_one_node_kills_on_both(node: Node) -> None:
    jobs, pids = both(node, "signal.signal(signal.SIGINT, lambda *_: tell('asked'))\n" + WAITING)
    kill(jobs[0].pid, signal.SIGINT)
    for job in jobs:
        job.expect("asked", 1)
    kill(jobs[0].pid, signal.SIGINT)
    assert gone(jobs, pids) < PROMISED_S
    assert [job.wait() for job in jobs] == [130, 130]


def test_a_save_on_one_node_is_a_save_of_the_job(node: Node) -> None:
    jobs, pids = both(node, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75 if RANK == 0 else 0))\n" + WAITING)
    kill(jobs[1].pid, signal.SIGTERM)
    gone(jobs, pids)
    assert [job.wait() for job in jobs] == [75, 75]


def test_a_node_that_is_done_waits_for_the_others(node: Node) -> None:
    body = (
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(17))\ntell('ready', os.getpid())\nsys.exit(0) if RANK == 1 else wait_forever()\n"
    )
    jobs, pids = both(node, body)
    while jobs[1].members()[1:] and any(process.pid == pids[1] for process in jobs[1].members()):
        assert jobs[1].process.poll() is None
    kill(jobs[0].pid, signal.SIGUSR1)
    assert [job.wait() for job in jobs] == [17, 17]


def test_missing_nodes_are_named_at_the_deadline(node: Node) -> None:
    job = node(0, WAITING, "--join-timeout", "0.5", nnodes=3)
    assert job.wait() == 1
    assert "node 0 of 3 waits for the others at tcp://127.0.0.1:" in job.err
    assert "loopback: launchers of other machines need --master-addr; 0.5 s at most" in job.err
    assert "waited 0.5 s for nodes 1, 2 of 3" in job.err
    assert job.left_in_temporary() == []


def test_an_absent_node_zero_is_said_at_the_deadline(node: Node) -> None:
    job = node(1, WAITING, "--join-timeout", "0.5")
    assert job.wait() == 1
    assert "node 1 of 2 waits for the others at tcp://127.0.0.1:" in job.err
    assert "node 0 did not answer" in job.err


def test_two_launchers_for_one_node_are_refused_with_both(node: Node) -> None:
    first, second = node(0, WAITING, nnodes=3), None
    rival = node(1, WAITING, nnodes=3)
    second = node(1, WAITING, nnodes=3)
    loser = rival if rival_lost(rival, second) else second
    winner = second if loser is rival else rival
    assert loser.wait() == 2
    assert "two launchers claim --node-rank 1" in loser.err
    assert f"process {winner.pid}" in loser.err
    assert f"process {loser.pid}" in loser.err
    first.await_said("a node came and was refused")
    assert "two launchers claim --node-rank 1" in first.err
    assert first.process.poll() is None
    assert winner.process.poll() is None


def rival_lost(rival: Job, second: Job) -> bool:
    while rival.process.poll() is None and second.process.poll() is None:
        pass
    return rival.process.poll() is not None


@pytest.mark.parametrize(
    ("flags", "nnodes", "message"),
    [
        (("--nproc-per-node", "2"), 2, "--nproc-per-node is 2 on node 1"),
        ((), 3, "--nnodes is 3 on node 1"),
    ],
)
def test_nodes_that_differ_are_refused_with_both_values(node: Node, flags: tuple[str, ...], nnodes: int, message: str) -> None:
    first = node(0, WAITING)
    odd = node(1, WAITING, *flags, nnodes=nnodes)
    assert odd.wait() == 2
    assert message in odd.err
    assert "on node 0" in odd.err
    first.await_said("a node came and was refused")
    assert message in first.err
    assert first.process.poll() is None


@pytest.mark.parametrize(("flag", "log"), [("--log-dir", "rank0.log"), ("--output-dir", "rank.0/stderr")])
def test_a_node_whose_logs_another_job_writes_says_so_before_it_waits_for_others(node: Node, tmp_path: Path, flag: str, log: str) -> None:
    (tmp_path / "rank.0").mkdir()
    others = RankLog(tmp_path / log)
    refused = node(0, WAITING, flag, str(tmp_path))
    assert refused.wait() == 2
    assert f"{log} must be written by one job at a time" in refused.err
    others.close()


def test_a_refused_node_can_come_again(node: Node) -> None:
    first = node(0, "")
    assert node(1, "", "--nproc-per-node", "2").wait() == 2
    assert node(1, "").wait() == 0
    assert first.wait() == 0


def test_a_node_that_gives_up_waiting_can_come_again(node: Node) -> None:
    first = node(0, "tell('ready')\n", nnodes=3)
    await_listener(first)
    early = node(1, "", "--join-timeout", "0.5", nnodes=3)
    assert early.wait() == 1
    assert "node 2" in early.err
    others = [node(1, "", nnodes=3), node(2, "", nnodes=3)]
    assert [job.wait() for job in (first, *others)] == [0, 0, 0]


def test_a_node_with_another_key_is_refused(node: Node, tmp_path: Path) -> None:
    first = node(0, WAITING)
    stranger = node(1, WAITING, HORA_STATE_DIR=str(tmp_path / "another"))
    assert stranger.wait() == 1
    assert "key" in stranger.err
    first.await_said("refused a stranger at 127.0.0.1: it has another key")
    assert first.process.poll() is None


def test_ctrl_c_while_waiting_for_nodes_leaves_at_once(node: Node) -> None:
    job = node(0, WAITING)
    job.guardian_after(None)
    kill(job.pid, signal.SIGINT)
    assert job.wait() == 130
    assert job.left_in_temporary() == []


def test_a_taken_port_is_refused_with_what_to_change(start: Start) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        job = start("", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, ranks=0)
        assert job.wait() == 2
    assert f"127.0.0.1:{port}" in job.err
    assert "--master-port" in job.err


@pytest.mark.timeout(180)
def test_training_on_two_nodes_is_that_on_one(node: Node, start: Start, tmp_path: Path) -> None:
    words = "'train', 'lm', '--config', 'demo', '--exact', '--device', 'cpu'"
    small = "'--set', 'epochs=1', '--set', 'model.hidden_size=8', '--set', 'data.max_vocabulary=100', '--set', 'data.rows=160'"

    def body(name: str) -> str:
        return f"from hora.cli.main import main\nraise SystemExit(main([{words}, {small}, '--run-dir', {str(tmp_path / name)!r}]))\n"

    assert start(body("one"), ranks=1).wait(150) == 0
    assert [job.wait(150) for job in (node(0, body("two")), node(1, body("two")))] == [0, 0]
    measured = []
    for name in ("one", "two"):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        measured.append([{**row, "tokens_per_s": None} for row in rows])
    assert len(measured[0]) > 10
    assert measured[0] == measured[1]
