"""What a script's mistakes look like: a clear error, with the script's line and hardly any of Hora's."""

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import hora.hvd as hvd
from hora.errors import HoraError
from hora.hvd import mpi_ops
from hora.hvd.elastic import running
from hora.hvd.exceptions import brief

PLAIN = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
GROUPED = ("grouped_allreduce", "grouped_allgather", "grouped_reducescatter")
OPERATIONS = sorted(
    name for name in mpi_ops.__all__ + hvd.__all__ if name.rstrip("_").removesuffix("_async") in (*PLAIN, *GROUPED, "sparse_allreduce")
)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def call(name: str, given: object, **more: Any) -> Any:
    others: dict[str, Any] = {"root_rank": 0} if "broadcast" in name else {"name": "x", "op": hvd.Sum} if "sparse" in name else {}
    return getattr(hvd, name)(given, **others, **more)


def test_all_operations_are_tried() -> None:
    assert len(set(OPERATIONS)) == 4 + 4 + 2 + 2 + 4 + 2 + 2 + 2 + 1


@pytest.mark.parametrize("name", sorted(set(OPERATIONS)))
def test_what_is_no_tensor_is_refused_with_what_was_given(name: str) -> None:
    takes = "a list of tensors" if "grouped" in name else "tensors"
    for given in (1.5, None, "word", {"a": 1}):
        with pytest.raises(TypeError) as caught:
            call(name, given)
        assert str(caught.value).startswith(f"hvd.{name} takes {takes}, but got a {type(given).__name__}: {given}; ")
        assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][-2:] == ["call", "call"], (
            "the test's, and brief's"
        )
    wrong = [[1, 2]] if "grouped" in name else [1, 2]
    with pytest.raises(TypeError, match=rf"hvd\.{name} takes tensors, but got a list: \[1, 2\]; make one of it \(torch.tensor\)"):
        call(name, wrong)
    with pytest.raises(TypeError, match=rf"hvd\.{name} takes tensors, but got a (ndarray|float64): "):
        call(name, np.ones(2))
    good = torch.ones(2).to_sparse() if "sparse" in name else torch.ones(2)
    with pytest.raises(TypeError, match=r"process_set must be a ProcessSet, but is a list instead: \[0\]"):
        call(name, [good] if "grouped" in name else good, process_set=[0])


@pytest.mark.parametrize(
    ("mistake", "kind", "text"),
    [
        (
            lambda: hvd.sparse_allreduce_async(torch.ones(2), "x", hvd.Sum),
            TypeError,
            "takes a sparse tensor, but got one of layout torch.strided",
        ),
        (
            lambda: hvd.alltoall(torch.ones(3), splits=3),
            TypeError,
            "splits must be a list of whole numbers or a tensor of int32, but got a int: 3",
        ),
        (
            lambda: hvd.alltoall(torch.ones(3), splits=[1.5]),
            TypeError,
            r"whole numbers or a tensor of int32, but got a list: \[1.5\]",
        ),
        (lambda: hvd.alltoall(torch.ones(3), splits=[9]), ValueError, "Sum of splits entries is greater"),
        (lambda: hvd.allgather(torch.tensor(1.0)), IndexError, "has no dimension"),
        (lambda: hvd.allreduce(torch.ones(2, 3).t()), ValueError, "Tensor is required to be contiguous"),
        (
            lambda: hvd.grouped_allgather([torch.ones(2), torch.ones(2, device="meta")]),
            ValueError,
            r"tensors of one group must be on one kind of device, but are on \['cpu', 'meta'\]",
        ),
        (lambda: hvd.allreduce(torch.ones(2), op=17), ValueError, "op must be one of hvd.Average"),
        (lambda: hvd.broadcast(torch.ones(2), 5), ValueError, "root_rank must be one of the ranks"),
        (lambda: hvd.reducescatter(torch.ones(2), op=hvd.Max), RuntimeError, "only Sum and Average"),
        (lambda: hvd.DistributedOptimizer("sgd"), TypeError, "optimizer must be a torch.optim.Optimizer, but is a str instead: sgd"),
        (lambda: hvd.broadcast_optimizer_state(None, 0), TypeError, "optimizer must be a torch.optim.Optimizer, but is a NoneType"),
        (lambda: hvd.broadcast_parameters(3, 0), ValueError, "invalid params of type: <class 'int'>"),
        (lambda: hvd.ProcessSet(["0"]), ValueError, r"takes a list of ranks or a communicator of mpi4py, but got a list: \['0'\]"),
        (lambda: hvd.ProcessSet(3), TypeError, "takes a list of ranks or a communicator of mpi4py, but got a int: 3"),
        (lambda: hvd.add_process_set([0]), ValueError, "process sets can be added only where"),
        (lambda: hvd.barrier(process_set=0), TypeError, "process_set must be a ProcessSet, but is a int instead: 0"),
    ],
)
def test_a_mistake_shows_the_line_of_the_script_and_one_of_hora(mistake: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        mistake()
    assert isinstance(caught.value, HoraError), "raised on purpose"
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames == ["test_a_mistake_shows_the_line_of_the_script_and_one_of_hora", "<lambda>", "call"]


def test_a_process_set_that_is_not_known_has_no_size() -> None:
    for ask in (hvd.ProcessSet([0]).size, hvd.ProcessSet([0]).rank):
        with pytest.raises(ValueError, match=r"ranks=\[0\]\) has not been registered"):
            ask()


def test_the_handle_of_a_group_gives_a_list() -> None:
    for begin in (hvd.grouped_allreduce_async, hvd.grouped_allreduce_async_, hvd.grouped_allgather_async, hvd.grouped_reducescatter_async):
        assert type(hvd.synchronize(begin([torch.ones(2)]))) is list


def test_a_fault_of_horas_own_is_shown_whole() -> None:
    @brief
    def deep() -> None:
        int("x")

    with pytest.raises(ValueError, match="invalid literal") as caught:
        deep()
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][-2:] == ["call", "deep"]


def in_the_script(error: type[Exception]) -> None:
    raise error("of the script")


@pytest.mark.parametrize("kind", [KeyError, hvd.HorovodInternalError])
def test_an_error_out_of_an_elastic_function_shows_the_lines_of_the_script(kind: type[Exception]) -> None:
    state = hvd.elastic.ObjectState(lambda value: value, hvd.rank, step=0)
    with pytest.raises(kind) as caught:
        running.run_fn(lambda _: in_the_script(kind), lambda: None)(state)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[1:] == ["wrapper", "<lambda>", "in_the_script"]


def test_an_elastic_function_whose_ranks_cannot_meet_anew_ends_with_its_first_error() -> None:
    def meet() -> None:
        raise HoraError("rank 1 has ended")

    state = hvd.elastic.ObjectState(lambda value: value, hvd.rank, step=0)
    with pytest.raises(hvd.HorovodInternalError, match="of the script") as caught:
        running.run_fn(lambda _: in_the_script(hvd.HorovodInternalError), meet)(state)
    assert caught.value.__notes__ == ["elastic.run gives up, for the ranks cannot meet anew: rank 1 has ended"]
    assert caught.value.__suppress_context__
