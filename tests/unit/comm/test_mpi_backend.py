"""What backend mpi decides without MPI: how a call is told, what can be combined, where torch lets it in, and whether all ranks are on one node."""

import re

import pytest
import torch
import torch.distributed as dist

from hora.comm.backends.mpi import register
from hora.comm.backends.mpi.calls import TEXT_BYTES, Call, explain, mpi_names
from hora.comm.backends.mpi.library import Neighbour, on_one_node
from hora.comm.backends.python_group import op_name
from hora.comm.backends.queued import Mismatched
from hora.comm.torch_private import provide_mpi
from hora.errors import ConfigError

SUM = Call("all_reduce", 4096, torch.float32, "SUM")


def test_call_is_told_in_words():
    assert str(SUM) == "all_reduce of 4.0 KiB float32 SUM"
    assert str(Call("broadcast", 3, root=1)) == "broadcast of 3 bytes with root 1"
    assert str(Call("all_to_all", -1)) == "all_to_all"


@pytest.mark.parametrize(
    "other",
    [
        Call("all_reduce", 4097, torch.float32, "SUM"),
        Call("all_reduce", 4096, torch.int32, "SUM"),
        Call("all_reduce", 4096, torch.float32, "MAX"),
        Call("reduce", 4096, torch.float32, "SUM", 0),
        Call("reduce", 4096, torch.float32, "SUM", 1),
    ],
)
def test_calls_that_differ_have_different_digests(other):
    assert SUM.digest == Call("all_reduce", 4096, torch.float32, "SUM").digest != other.digest
    assert 0 <= other.digest < 2**62  # so that its negative is a number of MPI's as well


def test_difference_names_ranks_and_exact_sizes():
    told = SUM.told + Call("all_reduce", 4097, torch.float32, "SUM").told + SUM.told
    assert len(told) == 3 * TEXT_BYTES
    words = "rank 0, rank 2: all_reduce of 4.0 KiB float32 SUM (4096); rank 1: all_reduce of 4.0 KiB float32 SUM (4097)"
    assert words in str(explain(told, 3))
    assert isinstance(explain(told, 3), Mismatched)  # which collectives tell as CollectiveMismatch


@pytest.mark.parametrize(
    ("dtype", "op", "names"),
    [
        (torch.float32, "SUM", ("FLOAT", "SUM")),
        (torch.bfloat16, "AVG", ("FLOAT", "SUM")),
        (torch.int64, "BXOR", ("INT64_T", "BXOR")),
        (torch.bool, "SUM", ("UINT8_T", "MAX")),
        (torch.bool, "PRODUCT", ("UINT8_T", "MIN")),
    ],
)
def test_names_of_mpi(dtype, op, names):
    assert mpi_names(dtype, op) == names


@pytest.mark.parametrize(("dtype", "op"), [(torch.float16, "BAND"), (torch.int8, "AVG"), (torch.bool, "AVG"), (torch.complex64, "SUM")])
def test_what_cannot_be_combined_is_refused(dtype, op):
    with pytest.raises(RuntimeError, match="backend mpi can"):
        mpi_names(dtype, op)


def test_operations_of_torch_have_names():
    assert op_name(dist.ReduceOp(dist.ReduceOp.AVG), "mpi") == "AVG"
    with pytest.raises(RuntimeError, match="reduce by SUM, AVG, .* but not by"):
        op_name(dist.ReduceOp.PREMUL_SUM, "mpi")


@pytest.mark.parametrize(
    ("environ", "one"),
    [
        ({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "2"}, True),
        ({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "4"}, False),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "2"}, False),
        ({}, False),
    ],
)
def test_one_node_is_known_by_what_the_launcher_says(environ, one):
    assert on_one_node(environ) is one


def test_process_is_told_in_a_record():
    mine = Neighbour("node1 pid:[4026531836]", 4711, 1764326489.27)
    assert Neighbour.unpack(mine.pack()) == mine
    assert mine.gone


@pytest.fixture
def c10d(monkeypatch):
    """What `provide_mpi` changes, as it is in a torch that was built without MPI, and put back afterwards."""
    module = dist.distributed_c10d
    monkeypatch.setattr(module, "_MPI_AVAILABLE", False)
    monkeypatch.setattr(module, "ProcessGroupMPI", None, raising=False)
    monkeypatch.setattr(module, "_new_process_group_helper", module._new_process_group_helper)
    return module


def test_torch_is_changed_once(c10d):
    assert provide_mpi(lambda ranks, timeout: (ranks, timeout)) is None
    assert dist.is_mpi_available()
    provided = c10d.ProcessGroupMPI
    assert provide_mpi(lambda ranks, timeout: None) is None
    assert c10d.ProcessGroupMPI is provided


def test_torch_that_was_built_with_mpi_is_left_alone(c10d, monkeypatch):
    monkeypatch.setattr(c10d, "_MPI_AVAILABLE", True)
    register()
    assert c10d.ProcessGroupMPI is None


def test_torch_that_makes_groups_otherwise_is_refused(c10d, monkeypatch):
    monkeypatch.setattr(c10d, "_new_process_group_helper", lambda options: None)
    pytest.importorskip("mpi4py")
    with pytest.raises(ConfigError, match=re.escape(f"PyTorch {torch.__version__} makes its groups in a way that")):
        register()
    assert not dist.is_mpi_available()
