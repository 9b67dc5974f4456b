"""Looks at several hosts: at each as on this one, and at what is between them. Starts an agent on each, as the launcher does, and asks."""

import os
import secrets
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hora.diag.doctor import between
from hora.diag.doctor.finding import Finding, ok, wrong
from hora.launch import ports
from hora.launch.asking import address_here, working_directory
from hora.launch.dealing import find_here
from hora.launch.hosts import Host
from hora.launch.remote import Remote
from hora.launch.remotes import Fields, Remotes
from hora.launch.rsh import agent_command
from hora.launch.travel import travelling
from hora.launch.wire import as_text
from hora.rendezvous.key import new_key

AGENT = "hora.diag.doctor.agent"
_LOOK_S, _ANSWER_S = 90.0, 30.0
_HERE = "this machine"


@dataclass(frozen=True)
class Request:
    """What is to be looked at; the fields are those of `LaunchOptions`."""

    hosts: tuple[Host, ...]
    rsh: str | None = None
    remote_python: str | None = None
    interface: str | None = None
    shared_dir: Path | None = None


def examine_hosts(request: Request) -> list[Finding]:
    """What is found on each host, and between them.

    Raises:
        ConfigError: two hosts are this machine, the interface is not there, or the remote shell is no command.
    """
    here = next(iter(find_here(request.hosts, ports.is_this_machine)), None)
    with Remotes() as remotes:
        round_of = _Rounds(remotes, [host.name for host in request.hosts] + ([_HERE] if here is None else []))
        for node, name in enumerate(round_of.names):
            is_here = node == here or name == _HERE
            command = [sys.executable, "-u", "-m", AGENT] if is_here else _remote_command(request, name)
            remotes.add(node, Remote(name, command, request.remote_python or sys.executable))
        found = list(_examine(request, round_of))
        round_of.ask({"do": "take leave"})
        return found + round_of.problems


def _remote_command(request: Request, name: str) -> list[str]:
    return agent_command(name, rsh=request.rsh, python=request.remote_python, environ=os.environ, module=AGENT)


class _Rounds:
    """Questions to all hosts that answer, one after the other; a host that fails to is a finding, and is not asked again."""

    def __init__(self, remotes: Remotes, names: Sequence[str]) -> None:
        self.names = names
        self.problems: list[Finding] = []
        self._remotes = remotes

    def ask(self, question: Mapping[str, Any], to: Collection[str] | None = None, timeout_s: float = _ANSWER_S) -> dict[str, Fields]:
        """The answers to a question, by host; `to` says who is asked, if not all."""
        return self.ask_each({name: question for name in self.names if to is None or name in to}, timeout_s)

    def ask_each(self, questions: Mapping[str, Mapping[str, Any]], timeout_s: float = _ANSWER_S) -> dict[str, Fields]:
        """The answers to a question for each host."""
        nodes = {self.names.index(name): question for name, question in questions.items()}
        answers, problems = self._remotes.try_ask({node: nodes[node] for node in nodes if node in self._remotes.nodes}, timeout_s)
        for node, problem in problems.items():
            self.problems.append(wrong("is reached", problem, "mend that first, then look again"))
            self._remotes.dismiss(node)
        return {self.names[node]: answer for node, answer in answers.items()}


def _examine(request: Request, rounds: _Rounds) -> Iterator[Finding]:
    looked = rounds.ask(_first_question(request), timeout_s=_LOOK_S)
    for name, answer in looked.items():
        if name != _HERE:
            yield from (Finding(**{**finding, "host": name}) for finding in answer["findings"])
    if looked:
        yield ok("is reached", ", ".join(name for name in looked if name != _HERE) or "none")
    if len(looked) > 1:
        yield from _compare(looked)
        if told := {name: clock for name in looked if (clock := _clock(rounds, name))}:
            yield between.clocks(told)
        yield from _try_network(rounds, {name: answer["address"] for name, answer in looked.items()})
    if request.shared_dir is not None:
        yield from _try_directory(rounds, request.shared_dir, [name for name in looked if name != _HERE])


def _first_question(request: Request) -> dict[str, Any]:
    addresses = [host.address for host in request.hosts]
    variables = travelling(os.environ, same_python=request.remote_python is None)
    return {
        "do": "look",
        "environ": {as_text(name): as_text(value) for name, value in variables.items()},
        "directory": as_text(working_directory()),
        "shared_dir": None if request.shared_dir is None else as_text(os.path.abspath(request.shared_dir)),
        "names": addresses,
        "interface": request.interface,
        "towards": address_here(request.interface, [host.address for host in request.hosts if not ports.is_this_machine(host.address)]),
    }


def _compare(looked: Mapping[str, Fields]) -> Iterator[Finding]:
    install = "install the same on all hosts, or name another Python there with --remote-python"
    for what in ("hora", "python", "torch"):
        yield between.same(what, {name: answer[what] for name, answer in looked.items()}, install)
    yield between.same("system", {name: answer["system"] for name, answer in looked.items()}, "use hosts of one kind", "warning")
    yield between.same("code of Hora", {name: answer["code"] for name, answer in looked.items()}, "install the same checkout on all hosts")
    yield between.same(
        "code in this directory",
        {name: answer["directory"] for name, answer in looked.items()},
        "share the directory, or copy it to all hosts: ranks must run the same script (hora run --wdir names another)",
        "warning",
    )
    yield between.names({name: answer["names"] for name, answer in looked.items() if name != _HERE})


def _clock(rounds: _Rounds, name: str) -> between.Clock | None:
    begin, before = time.monotonic(), time.time()
    answer = rounds.ask({"do": "tell time"}, [name]).get(name)
    took_s = time.monotonic() - begin
    return between.Clock(answer["now"] - before - took_s / 2, took_s / 2) if answer else None


def _try_network(rounds: _Rounds, addresses: Mapping[str, str | None]) -> Iterator[Finding]:
    known = {name: address for name, address in addresses.items() if address is not None}
    if unknown := addresses.keys() - known.keys():
        yield wrong("ways between hosts", f"{', '.join(sorted(unknown))}: no way leads here", "name the network with --interface")
    key = new_key().hex()
    ports_of = {name: answer["port"] for name, answer in rounds.ask_each(_to_listen(known, key)).items()}
    listening = {name: known[name] for name in ports_of}
    if len(listening) < 2:
        return
    reached = rounds.ask_each({name: _to_reach(name, listening, ports_of, key) for name in listening})
    told = {name: answer["reached"] for name, answer in reached.items()}
    yield between.reach(told, listening)
    ring = [name for name in listening if name != _HERE and name in told]
    pairs = [(source, target) for source, target in zip(ring, [*ring[1:], *ring[:1]], strict=True) if source != target]
    measured = [
        between.Transfer(source, target, answer["bytes_per_s"])
        for source, target in pairs
        if told[source][target] is None
        # One at a time: they may share a wire.
        for answer in rounds.ask({"do": "send", "address": listening[target], "port": ports_of[target], "key": key}, [source]).values()
    ]
    if measured:
        yield between.speeds(measured)


def _to_listen(addresses: Mapping[str, str], key: str) -> dict[str, dict[str, Any]]:
    return {name: {"do": "listen", "address": address, "key": key} for name, address in addresses.items()}


def _to_reach(name: str, addresses: Mapping[str, str], ports_of: Mapping[str, int], key: str) -> dict[str, Any]:
    others = {other: [address, ports_of[other]] for other, address in addresses.items() if other != name}
    return {"do": "reach", "others": others, "key": key}


def _try_directory(rounds: _Rounds, directory: Path, hosts: Collection[str]) -> Iterator[Finding]:
    """Each host writes a file, and reads those of the others."""
    files = {host: f".hora-doctor-{secrets.token_hex(8)}" for host in hosts}
    texts = {host: secrets.token_hex(16) for host in hosts}
    there = as_text(os.path.abspath(directory))
    left = rounds.ask_each({host: {"do": "leave mark", "shared_dir": there, "name": files[host], "text": texts[host]} for host in hosts})
    if len(left) < 2:
        return
    told = rounds.ask({"do": "read marks", "shared_dir": there, "names": [files[host] for host in left]}, list(left))
    read = {host: {other: answer["read"].get(files[other], "") for other in left} for host, answer in told.items()}
    yield between.marks(str(directory), {host: texts[host] for host in left}, read)
