"""Fixtures of the fault tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts_kit import Hosts, StartOn
from launcher_kit import Job, Start, starting
from networks_kit import Network, making_network


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(body, *flags, ranks=2, **environ)` starts a launcher whose ranks run `body`; see `launcher_kit`."""
    with starting(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with making_network() as network:
        yield network


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path / "hosts")


@pytest.fixture
def start_on(start: Start, hosts: Hosts) -> Iterator[StartOn]:
    """`start_on("a:2,b:1", body, *flags)` starts a job whose ranks run there; none of its processes is left in the end."""
    started: list[Job] = []

    def start_job(names: str, body: str, *flags: str, **others: Any) -> Job:
        started.append(start(body, "-H", names, *hosts.rsh, "-x", "TELL", *flags, ranks=0, **others))
        return started[-1]

    yield start_job
    for job in started:
        if job.process.poll() is not None:
            assert job.gone_after([process.pid for process in job.members()]) < 10.0
            assert job.left_in_temporary() == []
    assert hosts.left() == []
