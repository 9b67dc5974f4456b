"""Asks all hosts of a job whether they have what it needs, before anything is started, and puts the answers together."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import hora
from hora.errors import ConfigError
from hora.launch import host, interfaces, ports
from hora.launch.dealing import deal_ranks
from hora.launch.options import LaunchOptions
from hora.launch.remote_agent import python_version
from hora.launch.remotes import Remotes
from hora.launch.travel import travelling
from hora.launch.wire import as_text

ANSWER_S = 60.0
"""How long hosts may take to answer: connecting, starting Python, looking for the script."""


_NARROW = ("127.", "::1", "fe80")
"""Beginnings of addresses that lead to one machine only, or along one link, by a name of it that differs from host to host."""


@dataclass(frozen=True)
class Answers:
    """What is known of the job once all hosts have answered.

    Args:
        counts: ranks of each host that has any.
        here: which of them this machine is, if it is one.
        address: of this machine for the others.
        master_addr: of the host of rank 0.
        script_port: free on the host of rank 0; None if that is this machine.
    """

    counts: tuple[int, ...]
    here: int | None
    address: str
    master_addr: str
    script_port: int | None


def ask_hosts(options: LaunchOptions, remotes: Remotes, here: int | None) -> Answers:
    """Asks the hosts in `remotes`; those that turn out to get no ranks are dismissed. `here` is the index of this machine.

    Raises:
        ConfigError: hosts lack what the user named, or another thing that the user gave is wrong; each is named.
        LaunchError: hosts cannot be used; each is named.
    """
    towards = address_here(options.interface, [options.hosts[node].address for node in remotes.nodes])
    question = make_question(options, towards)
    first = min([*remotes.nodes, *([] if here is None else [here])])
    answers = remotes.ask({node: question | {"first": node == first} for node in remotes.nodes}, min(ANSWER_S, options.join_timeout_s))
    found = {node: (answer["cores"], answer["gpus"]) for node, answer in answers.items()}
    if here is not None:
        found[here] = host.count_cores(), host.count_gpus({**os.environ, **options.exports}) if options.counts_gpus else 0
    counts = deal_ranks(options, [found.get(index, (1, 0)) for index in range(len(options.hosts))])
    counts = tuple(filter(None, counts))
    for node in [node for node in remotes.nodes if node >= len(counts)]:
        remotes.dismiss(node)
    address = towards or _address_seen(answers)
    zero = answers.get(0)
    return Answers(
        counts,
        here if here is not None and here < len(counts) else None,
        address,
        address if zero is None else _address_of_zero(zero, options),
        None if zero is None else zero["script_port"],
    )


def working_directory() -> str:
    """Where this process is, by the name that the user knows: a shell's PWD may lead through links that are the same on all hosts."""
    named = os.environ.get("PWD", "")
    return named if os.path.isabs(named) and os.path.isdir(named) and os.path.samefile(named, ".") else os.getcwd()


def make_question(options: LaunchOptions, towards: str | None) -> dict[str, Any]:
    """What a host is asked that is to run ranks, but for whether it is the first; `towards` is the address of this machine."""
    travelled = travelling(os.environ, same_python=options.remote_python is None)
    return {
        "hora": hora.__version__,
        "python": python_version(),
        "directory": as_text(working_directory()),
        "environ": {as_text(name): as_text(value) for name, value in travelled.items()},
        "interface": options.interface,
        "towards": towards,
        "counts_gpus": options.counts_gpus,
        "options": {
            "target": as_text(options.target),
            "args": [as_text(word) for word in options.args],
            "kind": options.kind,
            "grace_s": options.grace_s,
            "join_timeout_s": options.join_timeout_s,
            "logical_ranks": options.logical_ranks,
            "shared_dir": None if options.shared_dir is None else as_text(os.path.abspath(options.shared_dir)),
            "exports": {as_text(name): as_text(value) for name, value in options.exports.items()},
            "bind": options.bind,
            "deadlines": dict(options.deadlines.given),
            "generation": options.generation,
        },
    }


def address_here(interface: str | None, names: Iterable[str]) -> str | None:
    """This machine's address for the hosts `names`: of the interface that was named, else on the way to the first host that one leads to.

    Raises:
        ConfigError: the interface has none.
    """
    if interface is not None:
        address = interfaces.address_of(interface)
        if address is None:
            raise ConfigError(f"--interface {interface} must have an address, but has none; name another")
        return address
    found = (interfaces.route_to(name) for name in names)
    return next((address for address in found if address and not address.startswith(_NARROW)), None)


def _address_seen(answers: dict[int, dict[str, Any]]) -> str:
    """The address that ssh shows hosts, if it is this machine's: their names may be known to ssh alone.

    Raises:
        ConfigError: there is none.
    """
    for answer in answers.values():
        if (seen := answer["seen_from"]) and not seen.startswith("fe80") and ports.is_this_machine(seen):
            return str(seen)
    raise ConfigError(
        "no name of a host leads to a network that this machine shares with it; give addresses in place of names (of more than one link), or name "
        "the network with --interface"
    )


def _address_of_zero(answer: dict[str, Any], options: LaunchOptions) -> str:
    if answer["address"] is None:
        raise ConfigError(f"{options.hosts[0].name} does not know its own address on the way here; name the network with --interface")
    return str(answer["address"])
