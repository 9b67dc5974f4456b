"""Networks: hosts that cannot reach each other any more, and strangers who knock at the doors of a job.

Hosts are network namespaces of this machine on one bridge, entered with `ip netns exec` in the place of ssh; a host is cut off by taking its
wire out of the bridge, so that what is sent is lost without a word.
"""

import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

from hora.diag.chaos import oracles, rights
from hora.diag.chaos.journal import named, starts_of
from hora.diag.chaos.restarts import go_on, judge
from hora.diag.chaos.scenario import Draw, Ground, Outcome, Scenario
from hora.diag.chaos.trial import Trial, job

_CUT_AFTER, _CUT_S, _ENDED_S = 8, 2.0, 45.0
_HOSTS = 2


@dataclass(frozen=True)
class _Network:
    """Two hosts, named by their addresses, on one bridge."""

    bridge: str
    hosts: tuple[str, ...]

    def wire(self, host: int) -> str:
        """The end of a host's wire that is at the bridge."""
        return f"{self.bridge}h{host}"

    def cut(self, host: int) -> None:
        """Takes a host off the bridge."""
        _ip("link", "set", self.wire(host), "nomaster")

    def mend(self, host: int) -> None:
        """Puts it back."""
        _ip("link", "set", self.wire(host), "master", self.bridge)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@contextmanager
def _network() -> Iterator[_Network]:
    number = os.getpid() % 250
    # Of another name each time: the kernel takes a while to remove what a namespace held.
    net = _Network(f"hc{secrets.token_hex(3)}", tuple(f"10.78.{number}.{host + 1}" for host in range(_HOSTS)))
    try:
        _ip("link", "add", net.bridge, "type", "bridge")
        _ip("address", "add", f"10.78.{number}.254/24", "dev", net.bridge)
        _ip("link", "set", net.bridge, "up")
        for index, name in enumerate(net.hosts):
            _ip("netns", "add", name)
            _ip("link", "add", net.wire(index), "type", "veth", "peer", "name", "wire", "netns", name)
            _ip("link", "set", net.wire(index), "master", net.bridge, "up")
            _ip("-n", name, "link", "set", "wire", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "address", "add", f"{name}/24", "dev", "wire")
        yield net
    finally:
        for name in net.hosts:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", net.bridge], capture_output=True, check=False)


def _partition(ground: Ground, draw: Draw) -> Outcome:
    """A short one is sat out; after one that does not end nobody is left, and the next start goes on."""
    settings = ground.settings(held=(_CUT_AFTER,))
    with _network() as net:
        words = ("-H", ",".join(net.hosts), "--rsh", "ip netns exec")
        with job(settings, *words) as trial:
            trial.held_at(_CUT_AFTER)
            net.cut(1)
            cut_s = trial.let_go(_CUT_AFTER)
            if draw.variant == "for 2 s":
                # That time passes is the fault.
                time.sleep(_CUT_S)
                net.mend(1)
                code = trial.wait()
                problems = judge(trial, settings, ground.golden(settings), code)
                problems += [] if len(starts_of(trial.events())) == 1 else ["nothing may be started anew after a short cut"]
                further = next((event.at_s for event in named(trial.events(), "step") if event.done == _CUT_AFTER + 2), None)
                return Outcome({"lost_steps": 0} | ({} if further is None else {"recovered_s": further - cut_s}), problems)
            members = [process for process in trial.members() if process.pid != trial.process.pid]
            code = trial.wait()
            gone_s = trial.gone_after(cut_s, members, _ENDED_S)
            problems = [] if code else ["the job must fail, but ends with exit code 0"]
            problems += [*_both_ended(trial, gone_s), *oracles.says(trial.text, "|".join(map(re.escape, net.hosts)))]
            heard_s = trial.heard_at("hora: ")
        net.mend(1)
    numbers, further_problems = go_on(ground, settings)
    detected = {} if heard_s is None else {"detected_s": heard_s - cut_s}
    return Outcome({"gone_s": gone_s, **detected, **numbers}, problems + further_problems)


def _both_ended(trial: Trial, gone_s: float) -> Iterator[str]:
    if gone_s > _ENDED_S:
        yield f"processes of the job are there {_ENDED_S:g} s after the network was cut"
    if files := trial.leftovers():
        yield f"left behind: {', '.join(files)}"


# Strangers -------------------------------------------------------------------------------------------------------------------------------

_OPENINGS = (
    b"",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\xff" * 4096,
    (2**40).to_bytes(8, "big") + bytes(4096),
    b"\x80\x04cposix\nsystem\n(S'exit 1'\ntR.",
    b"hora\0\0\0\1" + bytes(32) + b"\xff" * 65536,
)
_CALLS, _ANSWER_S = 300, 0.2
_MOST_SAID = 256
_LOOPBACK = ("127.0.0.1", "::1")


def _knock(ground: Ground, draw: Draw) -> Outcome:
    """A job whose rendezvous and gradients go over the network, at the addresses where it listens."""
    settings = ground.settings(held=(_CUT_AFTER,))
    with job(settings, variables={"HORA_PORTABLE": "1"}) as trial:
        trial.held_at(_CUT_AFTER)
        doors = _listening(trial)
        problems = [f"it listens at {host}, outside of this machine" for host in sorted({host for host, _ in doors} - set(_LOOPBACK))]
        problems += [] if doors else ["the fault did not strike: the job listens nowhere"]
        heard = [_call(door, opening, _ANSWER_S) for door in doors for opening in (*_OPENINGS, draw.random.randbytes(512))]
        heard += [_call(draw.random.choice(doors), draw.random.choice(_OPENINGS), 0.0) for _ in range(_CALLS if doors else 0)]
        problems += [f"a stranger was told {len(said)} bytes" for said in heard if len(said) > _MOST_SAID]
        trial.let_go(_CUT_AFTER)
        code = trial.wait()
        problems += judge(trial, settings, ground.golden(settings), code)
        problems += [] if len(starts_of(trial.events())) == 1 else ["strangers have ended a start of the job"]
    return Outcome({"lost_steps": 0}, problems)


def _listening(trial: Trial) -> list[tuple[str, int]]:
    found: set[tuple[str, int]] = set()
    for process in trial.members():
        with suppress(psutil.Error):
            found |= {(one.laddr.ip, one.laddr.port) for one in process.net_connections(kind="tcp") if one.status == psutil.CONN_LISTEN}
    return sorted(found)


def _call(door: tuple[str, int], opening: bytes, answer_s: float) -> bytes:
    """What a door says to an opening within so long a silence."""
    said = b""
    with suppress(OSError), socket.create_connection(door, 2.0) as sock:
        sock.sendall(opening)
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(answer_s)
        while len(said) <= _MOST_SAID and (part := sock.recv(4096)):
            said += part
    return said


SCENARIOS = (
    Scenario(
        "F4", "the network between two hosts is cut", _partition, ("for 2 s", "for good"),
        {"gone_s": 5.0, "recovered_s": 15.0, "lost_steps": 5}, lacks=lambda _: rights.to_make_networks(),
    ),
    Scenario("F21", "strangers knock where the job listens", _knock, wanted={"lost_steps": 0}),
)  # fmt: skip
