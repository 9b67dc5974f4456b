"""What a job of one node opens to the network: nothing outside loopback; and the port that is kept for scripts of torch.distributed."""

import socket
from pathlib import Path

import psutil
import pytest
from launcher_kit import Job, Start

LOOPBACK = ("127.0.0.1", "::1")

ALL_REDUCE = """\
import torch
import hora

session = hora.init()
total = hora.all_reduce(torch.ones(3))
assert total.tolist() == [2.0, 2.0, 2.0]
tell('ready')
while not os.path.exists(os.environ['GO']):
    time.sleep(0.01)
hora.all_reduce(torch.ones(3))
hora.shutdown()
"""

TORCH_ALONE = """\
import datetime, socket
import torch
import torch.distributed as dist

port = int(os.environ['MASTER_PORT'])
with socket.socket() as stranger:
    try:
        stranger.bind(('', port))
        tell('taken-away')
    except OSError:
        pass
dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=60))
tensor = torch.ones(1)
dist.all_reduce(tensor)
tell('sum', int(tensor.item()))
dist.destroy_process_group()
"""


def listening(job: Job) -> list[str]:
    """Addresses at which the processes of the job listen."""
    return [
        connection.laddr.ip
        for process in job.members()
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def test_nothing_of_a_job_listens_outside_loopback(start: Start, tmp_path: Path) -> None:
    """Nor within it, as the ranks share memory; Gloo's own sockets are on loopback."""
    for init, expected in (("hora.init()", set()), ("hora.init(backend='gloo')", set(LOOPBACK))):
        (tmp_path / "go").unlink(missing_ok=True)
        job = start(ALL_REDUCE.replace("hora.init()", init), GO=str(tmp_path / "go"))
        job.expect("ready", 2)
        assert set(listening(job)) <= expected
        assert bool(listening(job)) == bool(expected), "Gloo's own sockets should have been seen"
        (tmp_path / "go").touch()
        assert job.wait() == 0
        assert job.err == ""


def test_the_portable_way_listens_on_loopback_too(start: Start) -> None:
    job = start("tell('ready')\nwait_forever()\n", HORA_PORTABLE="1")
    job.expect("ready", 2)
    assert set(listening(job)) == {"127.0.0.1"}


def test_an_idle_launcher_listens_nowhere(start: Start) -> None:
    job = start("tell('ready')\nwait_forever()\n")
    job.expect("ready", 2)
    assert listening(job) == []


@pytest.mark.parametrize("libuv", ["0", "1"])
def test_scripts_of_torch_distributed_find_their_port_kept_for_them(start: Start, libuv: str) -> None:
    job = start(TORCH_ALONE, USE_LIBUV=libuv)
    assert job.expect("sum", 2) == {0: [2], 1: [2]}
    assert job.wait() == 0, job.err


def test_a_wanted_port_is_given_to_the_ranks(start: Start) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    job = start("tell('port', os.environ['MASTER_PORT'])\n", "--master_port", str(port))
    assert job.expect("port", 2) == {0: [port], 1: [port]}
    assert job.wait() == 0


def test_a_wanted_port_that_is_in_use_is_refused(start: Start) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        job = start("tell('started')\n", "--master_port", str(port))
        assert job.wait() == 2
    assert f"--master-port {port} is in use" in job.err
    assert job.left_in_temporary() == []
