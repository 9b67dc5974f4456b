"""The table of algorithms that comes with Hora."""

import runpy
from pathlib import Path

from hora.comm.algorithms import algorithm_table
from hora.plan.algorithm_table import choose

TOOL = Path(__file__).parents[3] / "tools" / "write_algorithm_table.py"


def test_it_is_what_was_measured() -> None:
    tool = runpy.run_path(str(TOOL))
    assert tool["TABLE"].read_text(encoding="utf-8") == tool["table"](), "run tools/write_algorithm_table.py"


def test_in_shared_memory_and_alone_it_is_native() -> None:
    table = algorithm_table(None)
    for device, backend in (("cpu", "shm"), ("cpu", "solo"), ("cuda", "solo")):
        assert {choose(table, size, device, backend, ranks, 1) for size in (1, 1 << 20, 1 << 30) for ranks in (1, 2, 8)} == {"native"}


def test_on_gpus_of_one_node_it_is_symmetric_up_to_the_size_where_nccl_is_as_fast() -> None:
    table = algorithm_table(None)
    for ranks in (2, 4, 8):
        chosen = [choose(table, size << 20, "cuda", "nccl", ranks, 1) for size in (0, 1, 64, 256, 1024)]
        assert chosen == ["symmetric"] * 3 + ["native"] * 2
    assert choose(table, 1 << 20, "cuda", "nccl", 4, 2) == "native"


def test_by_node_it_is_hierarchical_for_large_tensors_and_sooner_where_ranks_are_dealt_in_turns() -> None:
    table = algorithm_table(None)
    chosen = [[choose(table, size << 20, "cpu", "gloo", 4, 2, interleaved=order) for size in (1, 4, 64)] for order in (False, True)]
    assert chosen == [["native", "hierarchical", "hierarchical"], ["hierarchical"] * 3]
