"""One command for several hosts, which are processes of this machine behind a stand-in for ssh: where ranks run, and how all end together."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from hosts_kit import Hosts, StartOn
from launcher_kit import Job, kill

WAITING = "tell('ready', os.getpid())\nwait_forever()\n"
# Some tenths of a second on a quiet machine; less than the patience with silent agents, which should not be needed.
SOON_S = 5.0


def ready(job: Job, ranks: int = 2) -> list[int]:
    return [pids[0] for _, pids in sorted(job.expect("ready", ranks).items())]


def test_ranks_are_numbered_host_by_host_and_know_their_places(start_on: StartOn, tmp_path: Path) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "HORA_NUM_NODES", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"]
    body = (
        f"import json\njson.dump([os.environ.get(n) for n in {names} + ['ON_HOST', 'MASTER_PORT', 'HORA_JOB_ID']],"
        f" open({str(tmp_path)!r} + f'/{{RANK}}', 'w'))\n"
    )
    job = start_on("localhost:1,alpha:2,beta:4", body, "-np", "4")
    assert job.wait() == 0, job.err
    places = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert [place[:6] for place in places] == [
        ["0", "4", "0", "1", "0", "3"],
        ["1", "4", "0", "2", "1", "3"],
        ["2", "4", "1", "2", "1", "3"],
        ["3", "4", "0", "1", "2", "3"],
    ]
    assert [place[6:9] for place in places] == [["127.0.0.1", "lo", host] for host in (None, "alpha", "alpha", "beta")]
    assert len({tuple(place[9:]) for place in places}) == 1


def test_ranks_share_one_rendezvous_whose_key_nobody_could_see(start_on: StartOn) -> None:
    body = (
        "from hora.rendezvous.client import Client\nfrom hora.rendezvous.key import read_key\n"
        "key = read_key(os.environ['HORA_KEY_FILE'])\n"
        "import psutil\n"
        "for process in psutil.process_iter():\n"
        "    try:\n        seen = ' '.join(process.cmdline()) + ' '.join(f'{n}={v}' for n, v in process.environ().items())\n"
        "    except psutil.Error:\n        continue\n"
        "    assert key.hex() not in seen, process\n"
        "client = Client(os.environ['HORA_RENDEZVOUS'], key, name='rank', timeout_s=30)\n"
        "client.set(f'from/{RANK}', b'')\nclient.wait([f'from/{1 - RANK}'])\nclient.close()\n"
    )
    job = start_on("alpha,beta", body)
    assert job.wait() == 0, job.err


def test_words_variables_and_directory_arrive_exactly(start_on: StartOn, tmp_path: Path) -> None:
    place = tmp_path / "a place; with 'quotes'"
    place.mkdir()
    words = ["two words", "'\"$(touch x)`x`\\", "a\nb\t", "ä語", os.fsdecode(b"\xff\xfe"), "", "--", "-H"]
    body = (
        "import json\n"
        "names = ['NAMED', 'VALUE', 'SECRET', 'NCCL_DEBUG', 'HORA_TIMEOUT_S', 'CUDA_VISIBLE_DEVICES', 'PWD']\n"
        f"said = [os.getcwd(), sys.argv[1:], {{n: os.environ.get(n) for n in names}}, os.environ['PATH'].split(':')[0]]\n"
        f"json.dump(said, open({str(tmp_path / 'said')!r}, 'w'))\n"
    )
    environ = {"NAMED": "line\nline", "SECRET": "s", "NCCL_DEBUG": "WARN", "HORA_TIMEOUT_S": "77", "CUDA_VISIBLE_DEVICES": "5"}
    job = start_on("alpha", body, "-x", "NAMED", "-x", "VALUE=ä b", "--wdir", str(place), words=words, **environ)
    assert job.wait() == 0, job.err
    directory, arguments, variables, first_of_path = json.loads((tmp_path / "said").read_text())
    assert (directory, arguments) == (str(place), words)
    assert variables == {
        "NAMED": "line\nline", "VALUE": "ä b", "SECRET": None, "NCCL_DEBUG": "WARN", "HORA_TIMEOUT_S": "77", "CUDA_VISIBLE_DEVICES": None,
        "PWD": str(place),
    }  # fmt: skip
    assert os.path.exists(os.path.join(first_of_path, "python"))
    assert list(place.iterdir()) == []


def test_output_is_shown_and_logged_as_on_one_node(start_on: StartOn, tmp_path: Path) -> None:
    body = (
        "sys.stdout.buffer.write(b'out %d \\xff\\n' % RANK * 3000)\nsys.stdout.flush()\nprint('err', RANK, file=sys.stderr)\n"
        "sys.stdout.write('no end')\n"
    )
    job = start_on("localhost:1,chatty:2", body, "--log-dir", str(tmp_path / "logs"))
    assert job.wait() == 0, job.err
    shown = job.out.splitlines()
    for rank in range(3):
        assert shown.count(f"[{rank}] out {rank} �") == 3000
        assert shown.count(f"[{rank}] no end") == 1
        assert job.err.splitlines().count(f"[{rank}] err {rank}") == 1
        log = (tmp_path / "logs" / f"rank{rank}.log").read_bytes()
        assert log.count(b"out %d \xff\n" % rank) == 3000
        assert b"no end" in log
    assert len(shown) == 3 * 3001
    assert "Welcome" not in job.out + job.err


def test_quiet_shows_the_first_rank_and_logs_all(start_on: StartOn, tmp_path: Path) -> None:
    job = start_on("alpha,beta", "print('I am', RANK)\n", "--quiet", "--log-dir", str(tmp_path / "logs"))
    assert job.wait() == 0, job.err
    assert job.out == "[0] I am 0\n"
    assert (tmp_path / "logs" / "rank1.log").read_text() == "I am 1\n"


def test_a_rank_that_fails_is_reported_with_host_and_traceback(start_on: StartOn) -> None:
    body = "signal.signal(signal.SIGUSR1, lambda *_: explode())\ndef explode():\n    raise ValueError('no such number')\n" + WAITING
    job = start_on("localhost,beta", body)
    pids = ready(job)
    kill(pids[1], signal.SIGUSR1)
    assert job.gone_after(pids) < SOON_S
    assert job.wait() == 1
    assert job.err.count("rank 1 failed on beta") == 1
    assert f"process {pids[1]}" in job.err
    assert "ValueError: no such number" in job.err
    log = re.search(r"its log: (.*)", job.err)
    assert log is not None
    assert "ValueError" in Path(log[1]).read_text()


def test_the_signal_that_killed_a_rank_comes_through(start_on: StartOn) -> None:
    job = start_on("alpha,beta", "wait_forever() if RANK == 0 else os.kill(os.getpid(), signal.SIGSEGV)\n")
    assert job.wait() == 139
    assert re.search(r"rank 1 failed on beta \(process \d+\): killed by SIGSEGV", job.err)


@pytest.mark.parametrize(
    ("signum", "handler", "code", "said"),
    [
        (signal.SIGINT, "", 130, "ended by Ctrl-C"),
        (signal.SIGTERM, "", 143, "ended by SIGTERM"),
        (signal.SIGTERM, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n", 75, "after a save"),
    ],
)
def test_signals_reach_the_ranks_of_all_hosts(start_on: StartOn, signum: signal.Signals, handler: str, code: int, said: str) -> None:
    job = start_on("localhost,beta,gamma", handler + WAITING)
    pids = ready(job, 3)
    kill(job.pid, signum)
    assert job.gone_after(pids) < SOON_S
    assert job.wait() == code
    assert said in job.err
    assert "failed" not in job.err


def test_a_second_ctrl_c_kills_everywhere(start_on: StartOn) -> None:
    job = start_on("alpha,beta", "signal.signal(signal.SIGINT, lambda *_: tell('asked'))\n" + WAITING)
    pids = ready(job)
    kill(job.pid, signal.SIGINT)
    job.expect("asked", 2)
    kill(job.pid, signal.SIGINT)
    assert job.gone_after(pids) < SOON_S
    assert job.wait() == 130


def test_signals_for_the_ranks_alone_are_passed_on(start_on: StartOn) -> None:
    job = start_on("localhost,beta", "signal.signal(signal.SIGUSR1, lambda *_: tell('heard') or sys.exit(0))\n" + WAITING)
    ready(job)
    kill(job.pid, signal.SIGUSR1)
    job.expect("heard", 2)
    assert job.wait() == 0


GRANDCHILDREN = "tell('ready', os.getpid(), grandchild(), grandchild(own_session=True))\nwait_forever()\n"


@pytest.mark.parametrize("names", ["localhost,beta", "alpha,beta"])
def test_a_killed_launcher_leaves_nothing_anywhere(start_on: StartOn, names: str) -> None:
    job = start_on(names, GRANDCHILDREN)
    pids = [pid for pids in job.expect("ready", 2).values() for pid in pids]
    everybody = [process.pid for process in job.members()]
    kill(job.pid)
    assert job.gone_after(pids) < SOON_S
    assert job.gone_after(everybody) < SOON_S


@pytest.mark.parametrize(("names", "victim"), [("localhost,beta", "remote shell"), ("alpha,beta", "agent")])
def test_a_lost_host_ends_the_job_and_is_named(start_on: StartOn, hosts: Hosts, names: str, victim: str) -> None:
    job = start_on(names, GRANDCHILDREN)
    pids = [pid for pids in job.expect("ready", 2).values() for pid in pids]
    shell, agent = hosts.processes("beta")
    kill(shell if victim == "remote shell" else agent)
    assert job.gone_after(pids) < SOON_S
    assert job.wait() == 1
    assert "the host beta is lost" in job.err


def test_a_stopped_agent_does_not_hold_up_the_end(start_on: StartOn, hosts: Hosts) -> None:
    """As a host that hangs."""
    job = start_on("localhost,beta", WAITING)
    pids = ready(job)
    _, agent = hosts.processes("beta")
    kill(agent, signal.SIGSTOP)
    kill(job.pid)
    assert job.gone_after(pids[:1]) < SOON_S
    kill(agent, signal.SIGCONT)
    assert job.gone_after(pids) < SOON_S
