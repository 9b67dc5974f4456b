"""Which cores each rank gets."""

import os
from pathlib import Path

import pytest

from hora.launch import binding


@pytest.mark.parametrize(
    ("groups", "ranks", "dealt"),
    [
        ([[0], [1], [2], [3]], 2, [{0, 1}, {2, 3}]),
        ([[0], [1], [2]], 2, [{0}, {1, 2}]),
        ([[0], [1]], 4, [{0}, {0}, {1}, {1}]),
        ([[0, 1], [2, 3]], 2, [{0, 1}, {2, 3}]),
        ([[0, 1], [2, 3]], 4, [{0, 1}, {0, 1}, {2, 3}, {2, 3}]),
        ([[0, 1], [2, 3]], 1, [{0, 1, 2, 3}]),
        ([[5]], 2, [{5}, {5}]),
    ],
)
def test_cores_are_dealt_in_order(groups: list[list[int]], ranks: int, dealt: list[set[int]]) -> None:
    assert binding.deal_groups(groups, ranks) == dealt


@pytest.mark.parametrize(("text", "cores"), [("0-3,8\n", [0, 1, 2, 3, 8]), ("5", [5]), ("\n", [])])
def test_lists_of_the_kernel_are_read(text: str, cores: list[int]) -> None:
    assert binding.parse_cores(text) == cores


def test_nodes_of_memory_are_those_with_cores_that_are_allowed(tmp_path: Path) -> None:
    for node, text in {0: "0-1,16-17", 1: "2-3", 2: "", 10: "4-7", 9: "8"}.items():
        directory = tmp_path / f"sys/devices/system/node/node{node}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(text + "\n")
    assert binding.read_numa_nodes([0, 1, 4, 8, 17], tmp_path) == [[0, 1, 17], [8], [4]]


def test_a_kernel_without_nodes_of_memory_has_one(tmp_path: Path) -> None:
    assert binding.read_numa_nodes([1, 3], tmp_path) == [[1, 3]]


def test_ranks_are_bound_to_what_this_process_may_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 3, 6, 7})
    assert binding.cores_of_ranks("core", 2) == [{2, 3}, {6, 7}]
    assert binding.cores_of_ranks("numa", 2, tmp_path) == [{2, 3, 6, 7}] * 2
    assert binding.cores_of_ranks("none", 2) is None
