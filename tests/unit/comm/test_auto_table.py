"""The table of algorithms that comes with Hora."""

import runpy
from pathlib import Path

from hora.comm.algorithms import algorithm_table
from hora.plan.algorithm_table import choose

TOOL = Path(__file__).parents[3] / "tools" / "write_algorithm_table.py"


def test_it_is_what_was_measured() -> None:
    tool = runpy.run_path(str(TOOL))
    assert tool["TABLE"].read_text(encoding="utf-8") == tool["table"](), "run tools/write_algorithm_table.py"


def test_in_shared_memory_and_on_gpus_it_is_native() -> None:
    table = algorithm_table(None)
    for device, backend in (("cpu", "shm"), ("cuda", "nccl"), ("cpu", "solo")):
        assert {choose(table, size, device, backend, ranks, 1) for size in (1, 1 << 20, 1 << 30) for ranks in (1, 2, 8)} == {"native"}


def test_by_node_it_is_hierarchical_for_large_tensors_and_sooner_where_ranks_are_dealt_in_turns() -> None:
    table = algorithm_table(None)
    chosen = [[choose(table, size << 20, "cpu", "gloo", 4, 2, interleaved=order) for size in (1, 4, 64)] for order in (False, True)]
    assert chosen == [["native", "hierarchical", "hierarchical"], ["hierarchical"] * 3]
