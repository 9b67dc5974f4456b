"""What a node has, read from trees of files that stand for its kernel."""

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hora.errors import ConfigError
from hora.launch import host


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
        ({"sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 8),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 8),
        (
            {
                "proc/self/cgroup": "1:name=systemd:/x\n0::/user.slice/run.scope\n",
                "sys/fs/cgroup/user.slice/run.scope/cpu.max": "max 100000\n",
                "sys/fs/cgroup/user.slice/cpu.max": "400000 100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
    ],
)
def test_cores_are_those_bound_to_or_the_share_of_time(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    assert host.count_cores(tree(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [("", 0), ("0", 1), ("3,5", 2), ("GPU-1f, GPU-2e", 2), ("0,-1,2", 1), ("-1", 0), ("NoDevFiles", 0), ("MIG-4f,MIG-5e", 2)],
)
def test_cuda_visible_devices_says_how_many(tmp_path: Path, visible: str, gpus: int) -> None:
    files = {f"proc/driver/nvidia/gpus/{index}/information": "" for index in range(4)}
    assert host.count_gpus({"CUDA_VISIBLE_DEVICES": visible}, tree(tmp_path, files)) == gpus


def test_the_driver_says_how_many(tmp_path: Path) -> None:
    files = {f"proc/driver/nvidia/gpus/{index}/information": "" for index in range(4)}
    assert host.count_gpus({}, tree(tmp_path, files)) == 4


@pytest.mark.parametrize(("script", "gpus"), [("echo 'GPU 0: H100'; echo '  MIG 1g'; echo 'GPU 1: H100'", 2), ("exit 9", 0)])
def test_nvidia_smi_is_asked_where_the_driver_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, gpus: int) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert host.count_gpus({}, tmp_path) == gpus


def test_without_a_driver_there_are_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host.count_gpus({}, tmp_path) == 0


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.events": "low 0\noom 2\noom_kill 2\n"}, 2),
        (
            {
                "proc/self/cgroup": "5:cpu:/\n4:memory:/job\n0::/\n",
                "sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0\noom_kill 3\n",
            },
            3,
        ),
        ({"proc/self/cgroup": "4:memory:/job\n", "sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0\n"}, None),
        # In a container that has the host's names of groups, but sees its own group alone.
        ({"proc/self/cgroup": "4:memory:/docker/ab\n", "sys/fs/cgroup/memory/memory.oom_control": "under_oom 0\noom_kill 4\n"}, 4),
    ],
)
def test_memory_kills_are_counted_in_both_kinds_of_groups(tmp_path: Path, files: dict[str, str], kills: int | None) -> None:
    assert host.count_memory_kills(tree(tmp_path, files)) == kills


def test_nothing_of_linux_is_read_in_the_portable_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORA_PORTABLE", "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    files = {
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.events": "oom_kill 2\n",
        "proc/driver/nvidia/gpus/0/information": "",
        "sys/fs/cgroup/cpu.max": "100000 100000\n",
    }
    tree(tmp_path, files)
    assert host.count_memory_kills(tmp_path) is None
    assert host.count_gpus({}, tmp_path) == 0


@pytest.fixture
def file_limit() -> Iterator[tuple[int, int]]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield limits
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_limit_of_open_files_is_raised_to_what_ranks_need(file_limit: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, file_limit[1]))
    host.make_room(100)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 400


@pytest.mark.skipif(sys.platform != "linux", reason="limits differ")
def test_more_ranks_than_files_allow_are_refused(file_limit: tuple[int, int]) -> None:
    too_many = file_limit[1]
    with pytest.raises(ConfigError, match=f"{too_many} ranks on one node need .* open files here, but the limit is {file_limit[1]}"):
        host.make_room(too_many)
