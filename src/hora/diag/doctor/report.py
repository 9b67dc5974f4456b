"""All looks in their order, and what is shown of them."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from hora.diag.doctor import gpus, machine, network, shared, software
from hora.diag.doctor.finding import Finding, Grade, Look, examine

_MARKS: dict[Grade, str] = {"ok": "ok", "warning": "WARNING", "wrong": "WRONG"}


def examine_host(shared_dir: Path | None = None) -> list[Finding]:
    """What is found on this host."""
    looks: dict[str, Look] = {
        "versions": software.versions,
        "optional packages": software.extras,
        "variables of a launcher": software.environment,
        "cores": machine.cores,
        "memory": machine.memory,
        "open files": machine.open_files,
        "/dev/shm": machine.shared_memory,
        "directories": machine.directories,
        "sums in shared memory": software.kernel,
        "GPUs": gpus.gpus,
        "driver": gpus.driver,
        "host name": network.names,
        "interfaces": network.interfaces,
        "ports": network.ports,
        "open to the network": network.listeners,
    }
    if shared_dir is not None:
        looks["shared directory"] = partial(shared.shared_directory, shared_dir)
    return list(examine(looks))


def as_lines(findings: Sequence[Finding]) -> list[str]:
    """A line each, with the remedy on a line of its own; those of a host below its name, those between hosts at the end."""
    width = max(len(finding.name) for finding in findings)
    hosts = list(dict.fromkeys(finding.host for finding in findings))
    lines = []
    for host in sorted(hosts, key=lambda host: host is None):
        if len(hosts) > 1:
            lines.append(host or "between the hosts")
        for finding in (finding for finding in findings if finding.host == host):
            lines.append(f"{_MARKS[finding.grade]:7}  {finding.name:{width}}  {finding.found}")
            if finding.remedy:
                lines.append(f"{'':9}{'':{width}}  -> {finding.remedy}")
    return lines


def conclusion(findings: Sequence[Finding]) -> str:
    """The last line."""
    wrong, warnings = (sum(finding.grade == grade for finding in findings) for grade in ("wrong", "warning"))
    if not wrong and not warnings:
        return "nothing is in the way"
    return f"{wrong} wrong, {warnings} to be looked at"


def as_json(findings: Sequence[Finding]) -> str:
    """The same for programs."""
    return json.dumps([asdict(finding) for finding in findings], indent=1) + "\n"
