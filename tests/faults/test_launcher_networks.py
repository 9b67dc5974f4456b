"""One command for several hosts that share nothing but a wire: network namespaces of this machine, in which `ip netns exec` starts agents."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from launcher_kit import Job, Start, kill
from networks_kit import Network, needs_networks

SOON_S = 5.0
WAITING = "tell('ready', os.getpid())\nwait_forever()\n"


pytestmark = needs_networks


def start_on(start: Start, hosts: str, body: str, *flags: str) -> Job:
    return start(body, "-H", hosts, "--rsh", "ip netns exec", *flags, ranks=0)


MEETING = (
    "from hora.rendezvous.client import Client\nfrom hora.rendezvous.key import read_key\n"
    "client = Client(os.environ['HORA_RENDEZVOUS'], read_key(os.environ['HORA_KEY_FILE']), name='rank', timeout_s=30)\n"
    "client.set(f'from/{RANK}', b'')\nclient.wait([f'from/{1 - RANK}'])\nclient.close()\n"
    "print(os.environ['MASTER_ADDR'], os.environ['GLOO_SOCKET_IFNAME'], os.environ['NODE_RANK'])\n"
)


def test_hosts_meet_on_the_wire_that_they_share(start: Start, network: Network) -> None:
    first, second = network.v6
    job = start_on(start, f"[{first}],[{second}]", MEETING)
    assert job.wait() == 0, job.err
    assert sorted(job.out.splitlines()) == [f"[0] {first} wire0 0", f"[1] {first} wire1 1"]


def test_this_machine_is_one_of_the_hosts(start: Start, network: Network) -> None:
    here = network.v4[0].rpartition(".")[0] + ".254"
    job = start_on(start, f"{here},{network.v4[1]}", MEETING)
    assert job.wait() == 0, job.err
    assert sorted(job.out.splitlines()) == [f"[0] {here} {network.bridge} 0", f"[1] {here} wire1 1"]


@pytest.mark.parametrize("kind", ["v4", "v6"])
def test_launchers_that_are_started_by_hand_keep_sockets_on_the_wire(network: Network, tmp_path: Path, kind: str) -> None:
    """Whatever a host calls itself: often its own name leads to loopback there."""
    script = tmp_path / "script.py"
    script.write_text("import os\nRANK = int(os.environ['RANK'])\n" + MEETING)
    environ = os.environ | {"HORA_STATE_DIR": str(tmp_path / "state"), "TMPDIR": str(tmp_path)}
    first = getattr(network, kind)[0]
    words = ("--nnodes", "2", "--master-addr", first, "-np", "2", str(script))
    launchers = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, "-m", "hora.launch", "--node-rank", str(node), *words],
            env=environ, stdout=subprocess.PIPE, text=True,
        )
        for node, host in enumerate(network.v4)
    ]  # fmt: skip
    try:
        assert [launcher.communicate(timeout=60)[0] for launcher in launchers] == [f"[0] {first} wire0 0\n", f"[1] {first} wire1 1\n"]
    finally:
        for launcher in launchers:
            launcher.kill()


def test_an_interface_that_a_host_lacks_is_named(start: Start, network: Network) -> None:
    job = start_on(start, network.v4[0], "tell('started')\n", "--iface", network.bridge)
    assert job.wait() == 2
    assert f"{network.v4[0]}: there is no network interface '{network.bridge}' on this machine" in job.err


def test_a_host_that_cannot_reach_the_launcher_is_named(start: Start, network: Network) -> None:
    job = start_on(start, network.v4[0], "tell('started')\n", "--iface", "lo", "--join-timeout", "1")
    assert job.wait() == 1
    assert f"{network.v4[0]}: it cannot reach the launcher at tcp://127.0.0.1:" in job.err
    assert "--interface" in job.err


def test_a_killed_launcher_ends_the_ranks_of_all_hosts_even_where_the_agent_hangs(start: Start, network: Network) -> None:
    """`ip netns exec` becomes the agent, so that the launcher's guardian can reach it."""
    job = start_on(start, ",".join(network.v4), WAITING)
    pids = [pid for (pid,) in job.expect("ready", 2).values()]
    everybody = [process.pid for process in job.members()]
    agents = [process.pid for process in psutil.Process(job.pid).children() if "hora.launch.remote_agent" in process.cmdline()]
    assert len(agents) == 2
    kill(agents[1], signal.SIGSTOP)
    kill(job.pid)
    assert job.gone_after(pids) < SOON_S
    assert job.gone_after(everybody) < SOON_S
