"""The small parts of `hora.hvd` that need no ranks."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hora.errors import ConfigError
from hora.hvd import basics, hook, state
from hora.hvd.buckets import plan_buckets
from hora.hvd.engine.adasum import combine
from hora.hvd.engine.entry import Entry
from hora.hvd.engine.scaling import divide, scale
from hora.hvd.engine.timeline import Timeline
from hora.hvd.negotiation.request import Kind, Part, Request
from hora.hvd.negotiation.table import Ready
from hora.hvd.settings import timeline_from, tuning_from

MIB = 2**20


def test_variables_are_read_as_horovod_reads_them() -> None:
    assert tuning_from({}) == tuning_from({"HOROVOD_CYCLE_TIME": "1", "HOROVOD_FUSION_THRESHOLD": str(128 * MIB)})
    told = {"HOROVOD_CYCLE_TIME": "2.5", "HOROVOD_CACHE_CAPACITY": "0", "HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}
    found = tuning_from(told | {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9"})
    assert (found.cycle_s, found.cache_capacity, found.stall_warn_s, found.stall_end_s) == (0.0025, 0, 5.0, 9.0)
    off = tuning_from(told | {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9"})
    assert (off.stall_warn_s, off.stall_end_s) == (None, None)
    assert tuning_from({}).stall_end_s == 1800.0, "nobody waits for ever who has not asked for it"
    assert tuning_from({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}).stall_end_s is None
    assert timeline_from({"HOROVOD_TIMELINE": "DYNAMIC"}) is None
    assert timeline_from({"HOROVOD_TIMELINE": "a.json"}) == Path("a.json")
    for wrong in ("-1", "soon", "nan", "inf"):
        with pytest.raises(ConfigError, match=f"HOROVOD_CYCLE_TIME must be a number from 0, but is '{wrong}'"):
            tuning_from({"HOROVOD_CYCLE_TIME": wrong})


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.empty(size, dtype=dtype)) for size in sizes]


def test_buckets_begin_with_the_last_and_hold_one_type_each() -> None:
    some = [*parameters(MIB // 2, MIB // 2, MIB // 4), *parameters(8, dtype=torch.float64), *parameters(3 * MIB)]
    assert plan_buckets(some, None) == [[4], [3], [2, 1], [0]]
    assert plan_buckets([], None) == []


def test_groups_are_taken_as_they_are_asked_for() -> None:
    some = parameters(1, 1, 1, 1, 1)
    assert plan_buckets(some, 2) == [[0, 1, 2], [3, 4]]
    assert plan_buckets(some, 9) == [[0], [1], [2], [3], [4]]
    assert plan_buckets(some, [[some[3], some[0]], []]) == [[3, 0], [4, 2, 1]]


def test_integers_are_scaled_in_float64_and_cut_towards_zero() -> None:
    large = torch.tensor([2**40 + 2, -7])
    scale(large, 0.5)
    assert large.tolist() == [2**39 + 1, -3]
    third = torch.tensor([1.0])
    divide(third, 3, 1.0)
    assert third.item() == (torch.tensor(1.0) / 3).item()
    small = torch.tensor([5], dtype=torch.int8)
    divide(small, 2, 1.0)
    assert small.item() == 2


def test_places_are_those_of_the_nodes_that_have_a_rank_of_this_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three nodes, with two ranks, one, and two."""
    places = [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    records = [SimpleNamespace(node_rank=node, local_rank=local) for node, local in places]
    found = []
    for node, local in places:
        session = SimpleNamespace(records=records, topology=SimpleNamespace(node_rank=node, local_rank=local))
        monkeypatch.setattr(state, "current", lambda session=session: SimpleNamespace(session=session))
        found.append((basics.cross_rank(), basics.cross_size()))
    assert found == [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]
    assert not basics.is_homogeneous()
    del records[1], records[-1]
    assert basics.is_homogeneous()


def test_what_is_built_is_said() -> None:
    assert [basics.mpi_threads_supported(), basics.mpi_enabled(), basics.ddl_built(), basics.ccl_built()] == [False] * 4
    assert basics.mpi_built() == (find_spec("mpi4py") is not None)
    assert basics.gloo_enabled()
    assert basics.gloo_built()
    assert (basics.cuda_built(), basics.rocm_built()) == (torch.version.cuda is not None, torch.version.hip is not None)
    assert isinstance(basics.nccl_built(), int)
    assert basics.nccl_built() == 0 or torch.cuda.is_available()


def test_adasum_of_four_is_that_of_pairs() -> None:
    torch.manual_seed(0)
    a, b, c, d = torch.randn(4, 7, dtype=torch.float64)

    def pair(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (1 - x @ y / (2 * x @ x)) * x + (1 - x @ y / (2 * y @ y)) * y

    assert torch.allclose(combine([a, b, c, d]), pair(pair(a, b), pair(c, d)))
    assert combine([torch.zeros(2), torch.ones(2)]).tolist() == [1.0, 1.0]


def test_a_timeline_is_whole_after_each_event(tmp_path: Path) -> None:
    path, timeline = tmp_path / "t.json", Timeline()
    request = Request(Kind.ALLREDUCE, "allreduce.x", 0, (Part("float32", (2,)),))
    timeline.negotiating(request, 0)  # nobody listens yet
    timeline.start(path)
    counts = [len(json.loads(path.read_text()))]
    for step in (
        lambda: timeline.negotiating(request, 1),
        lambda: timeline.negotiating(request, 0),
        lambda: timeline.agreed(Ready({0: request})),
    ):
        step()
        counts.append(len(json.loads(path.read_text())))
    with timeline.working([Entry(request)]):
        counts.append(len(json.loads(path.read_text())))
    timeline.close()
    events = json.loads(path.read_text())
    assert counts == [1, 5, 6, 7, 8]
    assert [event["ph"] for event in events] == ["M", "M", "M", "B", "X", "X", "E", "B", "E"]
    assert events[-1]["args"] == {"dtype": "float32", "shape": "[[2]]"}


def test_a_timeline_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_TIMELINE", "/proc/nonesuch/timeline.json")  # which not even root can make
    with pytest.raises(ConfigError, match="the timeline cannot be written: .*/proc/nonesuch/timeline.json"):
        basics.init()
    assert not basics.is_initialized()


def test_the_hook_answers_and_says_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    hook.install()
    hook.install()
    try:
        import horovod.torch as hvd

        assert hvd.elastic.state.TorchState, "before it is asked for by name"
        from horovod.common.exceptions import HorovodVersionMismatchError
        from horovod.common.util import check_extension, extension_available, gloo_built, gpu_available, num_rank_is_power_2, split_list
        from horovod.torch.optimizer import _DistributedOptimizer

        check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", "/somewhere/__init__.py", "mpi_lib_v2")
        assert issubclass(HorovodVersionMismatchError, ImportError)
        assert hvd.__name__ == "hora.hvd"
        assert gloo_built is hvd.gloo_built
        assert (extension_available("torch"), extension_available("tensorflow", verbose=True)) == (True, False)
        assert gpu_available("torch") == torch.cuda.is_available()
        assert split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
        assert [num_rank_is_power_2(ranks) for ranks in (0, 1, 3, 4)] == [False, True, False, True]
        assert issubclass(_DistributedOptimizer, torch.optim.Optimizer)
        assert sys.modules["horovod"].__version__ == hook.VERSION
        with pytest.raises(ModuleNotFoundError, match=r"horovod.spark is not there: hora answers for"):
            __import__("horovod.spark")
        import horovod.common.elastic
        import horovod.torch.elastic.state
        import horovod.torch.mpi_ops

        elsewhere = {
            "Compression",
            "DistributedOptimizer",
            "HorovodVersionMismatchError",
            "HostsUpdatedInterrupt",
            "SyncBatchNorm",
            "elastic",
            "run",
        }
        elsewhere |= {"allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"}
        assert set(hvd.__all__) - set(horovod.torch.mpi_ops.__all__) == elsewhere, "all operations can be imported from there too"
        assert all(getattr(horovod.torch.mpi_ops, name) is getattr(hvd, name) for name in horovod.torch.mpi_ops.__all__)
        assert horovod.common.elastic.State is hvd.elastic.State
        assert horovod.torch.elastic.state.TorchState is hvd.elastic.state.TorchState is hvd.elastic.TorchState
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "horovod":
                del sys.modules[name]
