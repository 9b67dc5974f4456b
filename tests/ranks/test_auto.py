"""`auto`: the same numbers as `native` whatever it chooses, the same choice on all ranks, and nobody's file but rank 0's."""

import pytest
import torch

import hora
from hora.comm.algorithms import algorithm_table, auto
from hora.comm.algorithms.auto import choice
from hora.errors import CollectiveMismatch
from hora.plan.algorithm_table import Entry, Table, dump
from hora.testing import run_ranks

STEPS = ((0, "recursive_doubling"), (4096, "native"), (16384, "ring"), (65536, "ordered"), (262144, "hierarchical"))


def entry(backend: str, *steps: tuple[int, str], nodes: int = 1, interleaved: bool = False, ranks: int = 3) -> Entry:
    return Entry("cpu", backend, ranks, nodes, interleaved, steps)


def with_table(monkeypatch: pytest.MonkeyPatch, *entries: Entry) -> None:
    monkeypatch.setattr(hora.session().groups, "table", Table(entries))


def check_around_thresholds(steps) -> None:
    for begin, _ in steps:
        for size in {max(0, begin - 4), begin, begin + 4}:
            numbers = torch.arange(size // 4).remainder(1000).add(1.0)
            expected = hora.all_reduce(numbers * (hora.rank() + 1))
            found = hora.all_reduce(numbers * (hora.rank() + 1), algorithm="auto")
            assert torch.equal(found, expected), size
            assert torch.equal(found, numbers * sum(range(1, hora.world_size() + 1))), size


@run_ranks(1, 2, 3, 4)
def test_auto_gives_what_native_gives_around_each_threshold():
    with pytest.MonkeyPatch.context() as monkeypatch:
        with_table(monkeypatch, entry("shm", *STEPS), entry("solo", *STEPS))
        check_around_thresholds(STEPS)


@run_ranks(2, 3, backend="gloo")
def test_auto_gives_what_native_gives_with_the_table_that_comes_with_hora():
    with pytest.MonkeyPatch.context() as monkeypatch:
        with_table(monkeypatch, *algorithm_table(None).entries)
        chosen = {choice(torch.empty(size // 4), hora.session().groups) for size in (1024, 64 << 10, 16 << 20)}
        assert chosen == {"native", "recursive_doubling"}
        entries = [each for each in algorithm_table(None).entries if (each.backend, each.nodes) == ("gloo", 1)]
        check_around_thresholds({step for each in entries for step in each.steps})


@run_ranks(4, nodes=(0, 0, 1, 1))
def test_large_tensors_go_by_node():
    with pytest.MonkeyPatch.context() as monkeypatch:
        with_table(monkeypatch, *algorithm_table(None).entries)
        assert [choice(torch.empty(size // 4), hora.session().groups) for size in (1 << 20, 4 << 20)] == ["native", "hierarchical"]
        check_around_thresholds([(4 << 20, "hierarchical")])


@run_ranks(4, nodes=(0, 1, 0, 1))
def test_interleaved_ranks_go_by_node_sooner():
    with pytest.MonkeyPatch.context() as monkeypatch:
        with_table(monkeypatch, *algorithm_table(None).entries)
        assert [choice(torch.empty(size // 4), hora.session().groups) for size in (1 << 19, 1 << 20)] == ["native", "hierarchical"]
        check_around_thresholds([(1 << 20, "hierarchical")])


@run_ranks(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int64", "bool"])
def test_types_and_ops_are_those_of_the_algorithm_chosen(dtype):
    with pytest.MonkeyPatch.context() as monkeypatch:
        with_table(monkeypatch, entry("shm", (0, "ring")))
        tensor = torch.tensor([1, 0, 1]).to(getattr(torch, dtype))
        assert torch.equal(hora.all_reduce(tensor.clone(), "max", algorithm="auto"), tensor)
        assert torch.equal(hora.all_reduce(tensor.clone(), "min", algorithm="auto", async_op=True).wait(), tensor)


@run_ranks(2)
def test_ranks_agree_on_what_was_chosen_not_on_how():
    with pytest.MonkeyPatch.context() as monkeypatch:
        with_table(monkeypatch, entry("shm", (0, "ring")))
        assert hora.all_reduce(torch.ones(3), algorithm=("auto", "ring")[hora.rank()]).tolist() == [2.0] * 3
        with pytest.raises(CollectiveMismatch, match=r"float32 \[3\] sum ring .*float32 \[3\] sum native"):
            hora.all_reduce(torch.ones(3), algorithm=("auto", "native")[hora.rank()])


def body_joins(init_method: str, rank: int, exact: bool) -> list:
    with pytest.MonkeyPatch.context() as monkeypatch:
        read: list[int] = []
        monkeypatch.setattr(auto, "table_path", lambda original=auto.table_path: read.append(1) or original())
        hora.init(device="cpu", init_method=init_method, rank=rank, world_size=2, exact=exact, timeout_s=30.0)
        chosen = choice(torch.ones(3), hora.session().groups)
        total = hora.all_reduce(torch.ones(3), algorithm="auto").tolist()
        hora.shutdown()
    return [chosen, total, len(read)]


@pytest.mark.parametrize(("exact", "chosen", "num_read"), [(False, "ordered", 1), (True, "native", 0)])
def test_the_table_of_rank_0_counts_and_none_in_exact_mode(spawn_ranks, tmp_path, exact, chosen, num_read):
    for rank, algorithm in enumerate(["ordered", "ring"]):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "algorithms.json").write_text(dump(Table((entry("shm", (0, algorithm)),))))
    arguments = {"init_method": f"file://{tmp_path}/store", "exact": exact}
    ranks = [
        spawn_ranks(1, body_joins, join=False, environ={"HORA_STATE_DIR": str(tmp_path / str(rank))}, rank=rank, **arguments)
        for rank in range(2)
    ]
    outcomes = [outcome for rank in ranks for outcome in rank.wait()]
    assert [outcome.kind for outcome in outcomes] == ["passed", "passed"], outcomes
    assert [outcome.result for outcome in outcomes] == [[chosen, [2.0] * 3, num_read], [chosen, [2.0] * 3, 0]]
