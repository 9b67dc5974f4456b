"""One command for several hosts that share nothing but a wire: network namespaces of this machine, in which `ip netns exec` starts agents."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from launcher_kit import Job, Start, kill

SOON_S = 5.0
WAITING = "tell('ready', os.getpid())\nwait_forever()\n"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def can_make_networks() -> bool:
    name = f"hora-probe-{os.getpid()}"
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    entered = subprocess.run(["ip", "netns", "exec", name, "ip", "link", "set", "lo", "up"], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return entered


pytestmark = pytest.mark.skipif(not can_make_networks(), reason="needs the right to make network namespaces")


@dataclass(frozen=True)
class Network:
    """Two hosts, each by its addresses of both kinds; this machine has the address 254 on the same wire."""

    v4: tuple[str, str]
    v6: tuple[str, str]
    bridge: str


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    number = os.getpid() % 250
    net = Network((f"10.77.{number}.1", f"10.77.{number}.2"), (f"fd77:{number}::1", f"fd77:{number}::2"), bridge=f"hora{os.getpid()}")
    try:
        ip("link", "add", net.bridge, "type", "bridge")
        ip("address", "add", f"10.77.{number}.254/24", "dev", net.bridge)
        ip("address", "add", f"fd77:{number}::fe/64", "dev", net.bridge, "nodad")
        ip("link", "set", net.bridge, "up")
        for index, (v4, v6) in enumerate(zip(net.v4, net.v6, strict=True)):
            here, there = f"h{index}x{os.getpid()}", f"wire{index}"
            ip("netns", "add", v4)
            os.symlink(f"/run/netns/{v4}", f"/run/netns/{v6}")
            ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", v4)
            ip("link", "set", here, "master", net.bridge, "up")
            ip("-n", v4, "address", "add", f"{v4}/24", "dev", there)
            ip("-n", v4, "address", "add", f"{v6}/64", "dev", there, "nodad")
            ip("-n", v4, "link", "set", there, "up")
            ip("-n", v4, "link", "set", "lo", "up")
        yield net
    finally:
        for v4, v6 in zip(net.v4, net.v6, strict=True):
            Path(f"/run/netns/{v6}").unlink(missing_ok=True)
            subprocess.run(["ip", "netns", "del", v4], capture_output=True)
        subprocess.run(["ip", "link", "del", net.bridge], capture_output=True)


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
