"""Hosts that share nothing but a wire: network namespaces of this machine, which `ip netns exec` enters."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def can_make_networks() -> bool:
    name = f"hora-probe-{os.getpid()}"
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    entered = subprocess.run(["ip", "netns", "exec", name, "ip", "link", "set", "lo", "up"], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return entered


needs_networks = pytest.mark.skipif(not can_make_networks(), reason="needs the right to make network namespaces")


@dataclass(frozen=True)
class Network:
    """Two hosts, each by its addresses of both kinds; this machine has the address 254 on the same wire."""

    v4: tuple[str, str]
    v6: tuple[str, str]
    bridge: str

    @contextmanager
    def another_host(self) -> Iterator[str]:
        """A host of no job's, with the address 3 on the same wire: its name."""
        name = f"{self.v4[0].rpartition('.')[0]}.3"
        try:
            self._add(name, 3)
            ip("-n", name, "address", "add", f"{name}/24", "dev", "wire3")
            yield name
        finally:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _add(self, name: str, number: int) -> None:
        """A host with a wire to the bridge, and no address yet."""
        here, there = f"h{number}x{os.getpid()}", f"wire{number}"
        ip("netns", "add", name)
        ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        ip("link", "set", here, "master", self.bridge, "up")
        ip("-n", name, "link", "set", there, "up")
        ip("-n", name, "link", "set", "lo", "up")


@contextmanager
def making_network() -> Iterator[Network]:
    """A network that is there inside the `with` block."""
    number = os.getpid() % 250
    net = Network((f"10.77.{number}.1", f"10.77.{number}.2"), (f"fd77:{number}::1", f"fd77:{number}::2"), bridge=f"hora{os.getpid()}")
    try:
        ip("link", "add", net.bridge, "type", "bridge")
        ip("address", "add", f"10.77.{number}.254/24", "dev", net.bridge)
        ip("address", "add", f"fd77:{number}::fe/64", "dev", net.bridge, "nodad")
        ip("link", "set", net.bridge, "up")
        for index, (v4, v6) in enumerate(zip(net.v4, net.v6, strict=True)):
            net._add(v4, index)
            os.symlink(f"/run/netns/{v4}", f"/run/netns/{v6}")
            ip("-n", v4, "address", "add", f"{v4}/24", "dev", f"wire{index}")
            ip("-n", v4, "address", "add", f"{v6}/64", "dev", f"wire{index}", "nodad")
        yield net
    finally:
        for v4, v6 in zip(net.v4, net.v6, strict=True):
            Path(f"/run/netns/{v6}").unlink(missing_ok=True)
            subprocess.run(["ip", "netns", "del", v4], capture_output=True)
        subprocess.run(["ip", "link", "del", net.bridge], capture_output=True)
