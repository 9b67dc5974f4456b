"""One checker per collective: every dtype, world sizes 1 to 4, sizes that do not divide, no dimension, no element, no contiguous memory.

Values are small integers, which every dtype adds up exactly; what is expected is computed from them in closed form.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hora
from hora import events as hora_events
from hora.errors import CollectiveMismatch, ConfigError
from hora.testing import run_ranks

WORLD_SIZES = (1, 2, 3, 4)
FLOATS = ("float32", "float64", "bfloat16", "float16")
NUMBERS = (*FLOATS, "int64", "int32", "uint8")
MOVABLE = (*NUMBERS, "bool", "int16", "complex64", "float8_e4m3fn")


def shapes(world_size: int) -> list[tuple[int, ...]]:
    return [(0,), (1,), (7,), (world_size - 1,), (), (3, 0), (2, 5), (world_size, 3)]


def values(shape: tuple[int, ...], rank: int, dtype: torch.dtype) -> Tensor:
    """Numbers from 1 to 8 that differ between ranks and places."""
    return (torch.arange(torch.Size(shape).numel()).remainder(5).view(shape) + rank + 1).to(dtype)


def scattered(tensor: Tensor) -> Tensor:
    """The same values with a gap after each in memory."""
    spread = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    spread[..., 0] = tensor
    return spread[..., 0]


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found.to(torch.complex128), expected.to(torch.complex128)), f"{found} is not {expected}"


COMBINE = {
    "sum": lambda stack: stack.sum(0),
    "mean": lambda stack: stack.mean(0),
    "min": lambda stack: stack.amin(0),
    "max": lambda stack: stack.amax(0),
    "product": lambda stack: stack.prod(0),
}


def combined(op: str, shape: tuple[int, ...], world_size: int, dtype: torch.dtype) -> Tensor:
    stack = torch.stack([values(shape, rank, dtype).double() for rank in range(world_size)])
    return COMBINE[op](stack).to(dtype)


@run_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("op", ["sum", "min", "max", "product"])
@pytest.mark.parametrize("algorithm", ["native", "ordered"])
def test_all_reduce_combines_in_place(world_size, dtype, op, algorithm):
    dtype = getattr(torch, dtype)
    for shape in shapes(world_size):
        for form in (lambda tensor: tensor, scattered):
            tensor = form(values(shape, hora.rank() if op != "product" else hora.rank() % 2, dtype))
            stack = torch.stack([values(shape, rank if op != "product" else rank % 2, dtype).double() for rank in range(world_size)])
            result = hora.all_reduce(tensor, op, algorithm=algorithm)
            assert result is tensor
            assert_equal(tensor, COMBINE[op](stack).to(dtype))


@run_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_all_reduce_mean_is_the_sum_divided(world_size, dtype):
    dtype = getattr(torch, dtype)
    for shape in shapes(world_size):
        tensor = values(shape, hora.rank(), dtype)
        total = combined("sum", shape, world_size, dtype)
        assert_equal(hora.all_reduce(tensor, hora.ReduceOp.MEAN), total / world_size)


@run_ranks(*WORLD_SIZES)
def test_all_reduce_of_booleans_is_all_and_any(world_size):
    mine = torch.tensor([hora.rank() == 0, True, False])
    assert_equal(hora.all_reduce(mine.clone(), hora.ReduceOp.MIN), torch.tensor([world_size == 1, True, False]))
    assert_equal(hora.all_reduce(mine.clone(), hora.ReduceOp.PRODUCT), torch.tensor([world_size == 1, True, False]))
    assert_equal(hora.all_reduce(mine.clone(), hora.ReduceOp.MAX), torch.tensor([True, True, False]))


@run_ranks(2, 3, 4)
def test_ordered_all_reduce_adds_in_the_tree(world_size):
    terms = [torch.randn(1001, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (3 * rank) for rank in range(world_size)]
    expected = {
        2: lambda: terms[0] + terms[1],
        3: lambda: (terms[0] + terms[1]) + terms[2],
        4: lambda: (terms[0] + terms[1]) + (terms[2] + terms[3]),
    }[world_size]()
    for async_op in (False, True):
        found = hora.all_reduce(terms[hora.rank()].clone(), algorithm="ordered", async_op=async_op)
        assert torch.equal(found.wait() if async_op else found, expected)


@run_ranks(1, 2)
def test_all_reduce_of_a_parameter_leaves_autograd_alone():
    parameter = torch.nn.Parameter(torch.ones(3))
    hora.all_reduce(parameter)
    assert parameter.tolist() == [hora.world_size()] * 3
    assert (parameter.requires_grad, parameter.grad_fn) == (True, None)


@run_ranks(1, 2)
@pytest.mark.parametrize(
    ("dtype", "op", "reason"),
    [
        ("int64", "mean", "would be rounded"),
        ("bool", "sum", "cut off at 1"),
        ("int16", "sum", "convert to one of"),
        ("bool", "mean", "rounded"),
    ],
)
def test_all_reduce_refuses_what_would_surprise(dtype, op, reason):
    with pytest.raises(ConfigError, match=reason):
        hora.all_reduce(torch.zeros(2, dtype=getattr(torch, dtype)), op)


@run_ranks(1, 2)
def test_unknown_algorithm_and_reduction_are_refused_with_the_list():
    with pytest.raises(
        ConfigError, match='unknown algorithm "rnig"; choose one of: native, ordered, ring, recursive_doubling, hierarchical'
    ):
        hora.all_reduce(torch.zeros(2), algorithm="rnig")
    with pytest.raises(ConfigError, match='unknown reduction "average"; choose one of: sum, mean, min, max, product'):
        hora.all_reduce(torch.zeros(2), "average")


@run_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("dtype", MOVABLE)
def test_broadcast_overwrites_with_the_source(world_size, dtype):
    dtype = getattr(torch, dtype)
    for shape in shapes(world_size):
        for src in range(world_size):
            tensor = scattered(values(shape, hora.rank(), dtype))
            assert hora.broadcast(tensor, src) is tensor
            assert_equal(tensor, values(shape, src, dtype))


@run_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("dtype", MOVABLE)
def test_all_gather_gives_every_tensor(world_size, dtype):
    dtype = getattr(torch, dtype)
    for shape in shapes(world_size):
        for same_shape in (False, True):
            gathered = hora.all_gather(scattered(values(shape, hora.rank(), dtype)), same_shape=same_shape)
            assert len(gathered) == world_size
            for rank, part in enumerate(gathered):
                assert_equal(part, values(shape, rank, dtype))


@run_ranks(*WORLD_SIZES)
def test_all_gather_takes_first_dimensions_that_differ(world_size):
    for rows in (lambda rank: rank, lambda rank: world_size - rank, lambda rank: 5 if rank == 0 else 0):
        gathered = hora.all_gather(values((rows(hora.rank()), 3), hora.rank(), torch.float32))
        for rank, part in enumerate(gathered):
            assert_equal(part, values((rows(rank), 3), rank, torch.float32))


@run_ranks(2, 3)
def test_all_gather_refuses_other_dimensions_and_dtypes_on_every_rank():
    with pytest.raises(CollectiveMismatch, match=r"float32 \[2, 3\] from rank 0, torch.float32 \[2, 4\] from rank 1"):
        hora.all_gather(torch.zeros(2, 3 + min(hora.rank(), 1)))
    with pytest.raises(CollectiveMismatch, match=r"rank 1 is about to all_gather int64 tensors"):
        hora.all_gather(torch.zeros(2, dtype=torch.int64 if hora.rank() == 1 else torch.int32))
    with pytest.raises(CollectiveMismatch):
        hora.all_gather(torch.zeros([1] * min(hora.rank(), 1)))
    hora.barrier()


@run_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int64"])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_reduce_scatter_gives_each_rank_its_chunk(world_size, dtype, op):
    dtype = getattr(torch, dtype)
    for shape in [(0,), (1,), (7,), (world_size - 1,), (world_size, 3), (5, 2, 2), (3, 0)]:
        tensor = scattered(values(shape, hora.rank(), dtype))
        before = tensor.clone()
        chunk = hora.reduce_scatter(tensor, op)
        assert_equal(chunk, combined(op, shape, world_size, dtype).tensor_split(world_size)[hora.rank()])
        assert_equal(tensor, before)


@run_ranks(1, 2, 3)
def test_reduce_scatter_takes_means_and_booleans_and_refuses_scalars(world_size):
    chunk = hora.reduce_scatter(values((7,), hora.rank(), torch.float64), hora.ReduceOp.MEAN)
    total = combined("sum", (7,), world_size, torch.float64)
    assert_equal(chunk, (total / world_size).tensor_split(world_size)[hora.rank()])
    found = hora.reduce_scatter(torch.arange(world_size * 2) % 2 == 0, hora.ReduceOp.MIN)
    assert_equal(found, torch.tensor([True, False]))
    with pytest.raises(ConfigError, match="cuts the first dimension"):
        hora.reduce_scatter(torch.tensor(1.0))


@run_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("dtype", MOVABLE)
def test_all_to_all_delivers_to_each_rank(world_size, dtype):
    dtype = getattr(torch, dtype)

    def letter(sender: int, receiver: int) -> Tensor:
        return values([(sender, receiver), (receiver,), ()][(sender + receiver) % 3], sender + 2 * receiver, dtype)

    received = hora.all_to_all([scattered(letter(hora.rank(), receiver)) for receiver in range(world_size)])
    assert len(received) == world_size
    for sender, part in enumerate(received):
        assert_equal(part, letter(sender, hora.rank()))


@run_ranks(2, 3)
def test_all_to_all_refuses_wrong_numbers_and_mixed_dtypes(world_size):
    with pytest.raises(ConfigError, match=f"takes {world_size} tensors of one dtype"):
        hora.all_to_all([torch.zeros(1)])
    with pytest.raises(ConfigError, match="of one dtype"):
        hora.all_to_all([torch.zeros(1), *[torch.zeros(1, dtype=torch.int64)] * (world_size - 1)])
    with pytest.raises(CollectiveMismatch, match="int32"):
        hora.all_to_all([torch.zeros(1, dtype=torch.int32 if hora.rank() == 0 else torch.int64)] * world_size)


@run_ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", MOVABLE)
def test_send_and_recv_go_round_the_ring(world_size, dtype):
    dtype = getattr(torch, dtype)
    right, left = (hora.rank() + 1) % world_size, (hora.rank() - 1) % world_size
    for shape in ((0,), (7,), (), (2, 3)):
        received = scattered(torch.zeros(shape, dtype=dtype))
        mine = scattered(values(shape, hora.rank(), dtype))
        if hora.rank() == 0:
            hora.send(mine, right)
            hora.recv(received, left)
        else:
            assert hora.recv(received, left) is received
            hora.send(mine, right)
        assert_equal(received, values(shape, left, dtype))


@run_ranks(2)
def test_tags_of_send_and_recv_are_those_of_torch():
    if hora.rank() == 0:
        hora.send(torch.tensor([1]), 1, tag=7)
        dist.send(torch.tensor([2]).view(torch.uint8), 1, tag=8)
    else:
        raw = torch.zeros(1, dtype=torch.int64)
        dist.recv(raw.view(torch.uint8), 0, tag=7)
        assert raw.item() == 1
        assert hora.recv(torch.zeros(1, dtype=torch.int64), 0, tag=8).item() == 2


@run_ranks(1, 2)
def test_ranks_that_do_not_exist_are_refused(world_size):
    tensor = torch.zeros(1)
    for call in (lambda: hora.broadcast(tensor, world_size), lambda: hora.send(tensor, -1), lambda: hora.recv(tensor, world_size)):
        with pytest.raises(ConfigError, match=f"must be a rank from 0 to {world_size - 1}"):
            call()
    with pytest.raises(ConfigError, match="must be another rank"):
        hora.send(tensor, hora.rank())


@run_ranks(1, 2)
def test_tensors_that_cannot_be_sent_are_refused():
    with pytest.raises(ConfigError, match="must be on cpu, but is on meta"):
        hora.all_reduce(torch.zeros(1, device="meta"))
    with pytest.raises(ConfigError, match="must be dense"):
        hora.all_reduce(torch.zeros(2, 2).to_sparse())


@run_ranks(*WORLD_SIZES)
def test_async_results_come_from_wait_in_any_order(world_size):
    rank = hora.rank()
    reduced = hora.all_reduce(scattered(values((7,), rank, torch.float32)), hora.ReduceOp.MEAN, async_op=True)
    copied = hora.broadcast(values((3,), rank, torch.int16), world_size - 1, async_op=True)
    gathered = hora.all_gather(values((rank,), rank, torch.int64), async_op=True)
    chunk = hora.reduce_scatter(values((7,), rank, torch.float32), async_op=True)
    swapped = hora.all_to_all([torch.tensor([rank, receiver]) for receiver in range(world_size)], async_op=True)
    assert [part.tolist() for part in swapped.wait(timeout_s=30.0)] == [[sender, rank] for sender in range(world_size)]
    assert_equal(chunk.wait(), combined("sum", (7,), world_size, torch.float32).tensor_split(world_size)[rank])
    for sender, part in enumerate(gathered.wait()):
        assert_equal(part, values((sender,), sender, torch.int64))
    assert_equal(copied.wait(), values((3,), world_size - 1, torch.int16))
    assert_equal(reduced.wait(), combined("sum", (7,), world_size, torch.float32) / world_size)
    assert reduced.wait() is reduced.wait()


@run_ranks(1, 2, 4)
def test_barrier_is_passed_by_all_or_none(world_size):
    store = hora.session().store
    for number in range(3):
        store.add(f"came-to-barrier-{number}", 1)
        hora.barrier()
        assert store.add(f"came-to-barrier-{number}", 0) == world_size


@run_ranks(1, 2)
def test_observer_hears_of_each_collective():
    class Listener(hora_events.Observer):
        def __init__(self) -> None:
            self.heard: list[tuple[str, int, int, str]] = []

        def on_collective(self, *, kind: str, sequence: int, size_bytes: int, phase: str) -> None:
            self.heard.append((kind, sequence, size_bytes, phase))

    with hora_events.observe(Listener()) as listener:
        hora.all_reduce(torch.zeros(4))
        work = hora.broadcast(torch.zeros(2), async_op=True)
        hora.barrier()
        work.wait()
    first = listener.heard[0][1]
    assert listener.heard == [
        ("all_reduce", first, 16, "begin"),
        ("all_reduce", first, 16, "end"),
        ("broadcast", first + 1, 8, "begin"),
        ("barrier", first + 2, 0, "begin"),
        ("barrier", first + 2, 0, "end"),
        ("broadcast", first + 1, 8, "end"),
    ]


@run_ranks(1, 2, 3)
@pytest.mark.parametrize("algorithm", ["native", "ordered"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_of_any_rank_is_seen_by_all(world_size, op, algorithm):
    for bad in range(world_size):
        mine = torch.tensor([float("nan") if hora.rank() == bad else 1.0, float(hora.rank())])
        found = hora.all_reduce(mine, op, algorithm=algorithm)
        assert found[0].isnan()
        assert found[1] == (0.0 if op == "min" else world_size - 1)


@run_ranks(*WORLD_SIZES)
def test_many_tensors_are_combined_at_once(world_size):
    rank = hora.rank()
    tensors = [
        torch.full((3, 2), rank + 1.0),
        torch.full((), rank, dtype=torch.int64),
        torch.full((5,), 2.0 * rank).double(),
        torch.empty(0),
    ]
    tensors.append(torch.arange(6.0).view(2, 3).t())
    found = hora.all_reduce_coalesced(tensors)
    ranks = sum(range(world_size))
    assert [one is other for one, other in zip(found, tensors, strict=True)] == [True] * 5
    assert tensors[0].eq(ranks + world_size).all()
    assert tensors[1].item() == ranks
    assert tensors[2].eq(2 * ranks).all()
    assert torch.equal(tensors[4], world_size * torch.arange(6.0).view(2, 3).t())
    work = hora.all_reduce_coalesced([torch.full((2,), float(rank))], "mean", async_op=True)
    assert work.wait()[0].tolist() == [ranks / world_size] * 2
    assert hora.all_reduce_coalesced([]) == []


@run_ranks(2, 3)
def test_lists_that_differ_are_refused():
    shapes = [(2, 3), (3, 2)] if hora.rank() == 0 else [(3, 2), (2, 3)]
    with pytest.raises(CollectiveMismatch, match=r"sum of 2 tensors: float32 \[2, 3\], float32 \[3, 2\]"):
        hora.all_reduce_coalesced([torch.ones(shape) for shape in shapes])
    with pytest.raises(ConfigError, match="takes sums, means and products, but op is max"):
        hora.all_reduce_coalesced([torch.ones(1)], "max")


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@run_ranks(*WORLD_SIZES)
def test_sums_of_what_travels_in_half_precision_are_made_in_the_types_of_the_values(wire, world_size):
    wire_dtype = getattr(torch, wire)
    parts = [torch.randn(1001, generator=torch.Generator().manual_seed(rank)) for rank in range(world_size)]
    rounded = sum(part.to(wire_dtype).float() for part in parts).to(wire_dtype).float() if world_size > 1 else parts[0]
    for op, expected in (("sum", rounded), ("mean", rounded / world_size)):
        found = hora.all_reduce(parts[hora.rank()].clone(), op, wire_dtype=wire_dtype)
        torch.testing.assert_close(found, expected, rtol=2e-3 if wire == "float16" else 1e-2, atol=1e-3)
        assert len({tuple(other.tolist()) for other in hora.all_gather(found)}) == 1
    # 1 + 256 * 2^-9: added up in bfloat16 or float16 alone, the small ones would be lost.
    small = torch.full((4,), 1.0 if hora.rank() == 0 else 2.0**-9)
    assert hora.all_reduce_coalesced([small], wire_dtype=wire_dtype)[0][0].item() == pytest.approx(
        1 + (world_size - 1) * 2.0**-9, abs=2.0**-8
    )
    with pytest.raises(ConfigError, match=r"wire_dtype is for the sum or the mean of float32 or float64, but here torch.int64"):
        hora.all_reduce(torch.ones(3, dtype=torch.int64), wire_dtype=wire_dtype)
    with pytest.raises(ConfigError, match="wire_dtype must be one of torch.bfloat16, torch.float16, but is torch.float32"):
        hora.all_reduce(torch.ones(3), wire_dtype=torch.float32)
    with pytest.raises(ConfigError, match='leave out algorithm="ring"'):
        hora.all_reduce(torch.ones(3), algorithm="ring", wire_dtype=wire_dtype)


@run_ranks(*WORLD_SIZES)
def test_conjugate_and_negative_views_are_what_they_show(world_size):
    rank = hora.rank()
    for view, show in (
        (lambda number: torch.full((2,), complex(number, 1.0)).conj(), lambda number: torch.full((2,), complex(number, -1.0))),
        (lambda number: torch.full((2,), complex(0.0, number)).conj().imag, lambda number: torch.full((2,), -float(number))),
    ):
        assert torch.equal(hora.broadcast(view(0) if rank == 0 else show(9), 0), show(0))
        assert all(map(torch.equal, hora.all_gather(view(rank)), map(show, range(world_size))))


@run_ranks(1, 2)
def test_what_is_no_tensor_or_no_rank_is_refused():
    with pytest.raises(ConfigError, match="collectives take tensors, but got list"):
        hora.all_reduce([1, 2])
    with pytest.raises(ConfigError, match="src must be a rank from 0 to .*, but is a instead"):
        hora.broadcast(torch.ones(1), src="a")
    with pytest.raises(ConfigError, match="but here torch.float32 is to be reduced by max"):
        hora.all_reduce(torch.ones(1), "max", wire_dtype=torch.bfloat16)
    work = hora.all_reduce(torch.ones(1), async_op=True)
    with pytest.raises(ConfigError, match="timeout_s must be a positive number of seconds, but is -1 instead"):
        work.wait(timeout_s=-1)
    work.wait()
