"""One checker of all-reduce, crossed with algorithms, dtypes, ops, world sizes 1 to 4 and placements on nodes.

What is expected is what torch makes of the inputs of all ranks, stacked. Sizes on purpose: none, one, fewer than ranks, those that do not divide,
and one that travels in several pieces and segments.
"""

import socket

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hora
from hora.comm.algorithms import exchange, hierarchical, ring
from hora.errors import CollectiveMismatch, ConfigError
from hora.testing import run_ranks
from hora.testing.pool import place_on_node

ALGORITHMS = ("ring", "recursive_doubling", "hierarchical")
OPS = ("sum", "min", "max", "product")
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "uint8")
SHAPES = [(0,), (1,), (2,), (7,), (), (3, 0), (2, 5), (1013,)]
# Two nodes by node and in turns, three of which one is alone, uneven ones, a node per rank.
BY_NODE, IN_TURNS, UNEVEN, UNEVEN_IN_TURNS, ALONE = (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 0, 0, 1), (0, 1, 2)

COMBINE = {
    "sum": lambda stack: stack.sum(0),
    "mean": lambda stack: stack.mean(0),
    "min": lambda stack: stack.amin(0),
    "max": lambda stack: stack.amax(0),
    "product": lambda stack: stack.prod(0),
}


def values(shape: tuple[int, ...], rank: int, dtype: torch.dtype) -> Tensor:
    """Small integers, which every dtype adds and multiplies exactly, that differ between ranks and places."""
    return (torch.arange(torch.Size(shape).numel()).mul(rank + 3).remainder(4).view(shape) + 1).to(dtype)


def gaps(tensor: Tensor) -> Tensor:
    spread = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    spread[..., 0] = tensor
    return spread[..., 0]


def check_all_reduce(algorithm: str, op: str, dtype: torch.dtype, shape: tuple[int, ...], *, async_op: bool = False) -> None:
    expected = COMBINE[op](torch.stack([values(shape, rank, dtype).double() for rank in range(hora.world_size())])).to(dtype)
    mine = values(shape, hora.rank(), dtype)
    mine = gaps(mine) if async_op else mine
    found = hora.all_reduce(mine, op, algorithm=algorithm, async_op=async_op)
    found = found.wait() if async_op else found
    assert found is mine
    assert torch.equal(found, expected), f"{shape}: {found} is not {expected}"


def check_booleans(algorithm: str) -> None:
    first = torch.tensor([hora.rank() == 0, True, False])
    everywhere = torch.tensor([hora.world_size() == 1, True, False])
    assert torch.equal(hora.all_reduce(first.clone(), "min", algorithm=algorithm), everywhere)
    assert torch.equal(hora.all_reduce(first.clone(), "product", algorithm=algorithm), everywhere)
    assert torch.equal(hora.all_reduce(first.clone(), "max", algorithm=algorithm), torch.tensor([True, True, False]))


def check_same_bits(algorithm: str) -> None:
    """Sums that rounding makes depend on their order: the same on all ranks, and near the sum in float64."""
    numbers = torch.randn(1013, generator=torch.Generator().manual_seed(hora.rank())) * 10.0 ** hora.rank()
    terms = torch.stack(hora.all_gather(numbers)).double()
    found = hora.all_reduce(numbers.clone(), algorithm=algorithm)
    torch.testing.assert_close(found.double(), terms.sum(0), rtol=1e-5, atol=1e-6 * terms.abs().max().item())
    for other in hora.all_gather(found):
        assert torch.equal(other, found)


def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a thousand elements travel in several pieces of several segments."""
    monkeypatch.setattr(ring, "_PIECE_BYTES", 300)
    monkeypatch.setattr(hierarchical, "_SEGMENT_BYTES", 1000)


def check_all(algorithm: str) -> None:
    for op in OPS:
        for dtype in DTYPES:
            for shape in SHAPES:
                check_all_reduce(algorithm, op, getattr(torch, dtype), shape)
    check_all_reduce(algorithm, "mean", torch.float64, (2, 5), async_op=True)
    check_booleans(algorithm)
    check_same_bits(algorithm)
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_pieces(monkeypatch)
        for dtype in ("float64", "uint8"):
            for shape in SHAPES:
                check_all_reduce(algorithm, "sum", getattr(torch, dtype), shape, async_op=True)
        check_same_bits(algorithm)


@run_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_reduce_equals_torch_on_the_stacked_inputs(algorithm):
    check_all(algorithm)


@run_ranks(4, nodes=BY_NODE)
def test_hierarchical_on_two_nodes():
    here = hora.session()
    assert here.groups.nodes.ranks == ((0, 1), (2, 3))
    check_all("hierarchical")
    by_node = here.groups.by_node()
    assert (by_node.even, by_node.inside.size(), by_node.across.size()) == (True, 2, 2)


@run_ranks(4, nodes=IN_TURNS)
def test_hierarchical_on_ranks_dealt_to_nodes_in_turns():
    assert hora.session().groups.nodes.counterparts == ((0, 1), (2, 3))
    check_all("hierarchical")


@run_ranks(4, nodes=UNEVEN)
def test_hierarchical_on_uneven_nodes():
    check_all("hierarchical")
    assert (hora.session().groups.by_node().across is None) == (hora.rank() in (1, 2))


@run_ranks(5, nodes=UNEVEN_IN_TURNS)
def test_hierarchical_on_uneven_nodes_in_turns():
    assert hora.session().groups.nodes.ranks == ((0, 2, 3), (1, 4))
    check_all("hierarchical")


@run_ranks(3, nodes=ALONE)
def test_hierarchical_with_one_rank_a_node_makes_no_groups():
    check_all("hierarchical")
    assert hora.session().groups._by_node is None


@run_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("small", [False, True])
def test_ring_reduces_and_scatters_and_gathers(world_size, dtype, small):
    dtype = getattr(torch, dtype)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if small:
            small_pieces(monkeypatch)
        for shape in [(0,), (1,), (7,), (world_size, 3), (1013, 2)]:
            mine = values(shape, hora.rank(), dtype)
            stack = torch.stack([values(shape, rank, dtype).double() for rank in range(world_size)])
            for op in OPS:
                expected = COMBINE[op](stack).to(dtype).tensor_split(world_size)[hora.rank()]
                assert torch.equal(hora.reduce_scatter(mine, op, algorithm="ring"), expected)
                assert torch.equal(mine, values(shape, hora.rank(), dtype))
            for rank, part in enumerate(hora.all_gather(mine[: hora.rank() + 1], algorithm="ring")):
                assert torch.equal(part, values(shape, rank, dtype)[: rank + 1])


@run_ranks(2, 4)
def test_recursive_doubling_adds_in_the_tree_of_ordered(world_size):
    numbers = torch.randn(1001, generator=torch.Generator().manual_seed(hora.rank())) * 10.0 ** (3 * hora.rank())
    tree = hora.all_reduce(numbers.clone(), algorithm="ordered")
    assert torch.equal(hora.all_reduce(numbers.clone(), algorithm="recursive_doubling"), tree)


@run_ranks(2, 3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_half_precision_is_added_in_half_precision(world_size, algorithm):
    """256 + 1 is 256 in bfloat16, so ones that are added one by one to 256 are lost."""
    mine = torch.tensor([256.0 if hora.rank() == 0 else 1.0] * world_size, dtype=torch.bfloat16)
    assert (hora.all_reduce(mine, algorithm=algorithm) <= 258).all()


@run_ranks(2, 3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_of_any_rank_is_seen_by_all(world_size, algorithm, op):
    for bad in range(world_size):
        found = hora.all_reduce(torch.tensor([float("nan") if hora.rank() == bad else 1.0, 2.0]), op, algorithm=algorithm)
        assert found[0].isnan()
        assert found[1] == 2.0


@run_ranks(2)
def test_ranks_that_name_different_algorithms_are_told():
    with pytest.raises(CollectiveMismatch, match="sum ring.*sum native"):
        hora.all_reduce(torch.zeros(2), algorithm="ring" if hora.rank() == 0 else "native")
    with pytest.raises(CollectiveMismatch, match="any length ring"):
        hora.all_gather(torch.zeros(2), algorithm="ring" if hora.rank() == 0 else "native")
    with pytest.raises(
        ConfigError,
        match='unknown algorithm "tree"; choose one of: native, ordered, ring, recursive_doubling, hierarchical, symmetric, auto',
    ):
        hora.reduce_scatter(torch.zeros(2), algorithm="tree")


@run_ranks(2)
def test_messages_of_the_user_are_not_taken_for_the_ring_s():
    peer = 1 - hora.rank()
    sent, received = torch.full((4,), 7.0), torch.zeros(4)
    work = dist.isend(sent, peer)
    assert hora.all_reduce(torch.ones(8), algorithm="ring").tolist() == [2.0] * 8
    dist.recv(received, peer)
    work.wait()
    assert received.tolist() == [7.0] * 4


@run_ranks(3, 4)
@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling"])
def test_messages_in_batches_as_on_gpus_do_the_same(algorithm):
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_pieces(monkeypatch)
        monkeypatch.setattr(exchange, "must_batch", bool)
        for shape in SHAPES:
            check_all_reduce(algorithm, "sum", torch.float64, shape)
            check_all_reduce(algorithm, "max", torch.bfloat16, shape)


def body_comes_and_goes(adopted: bool, init_method: str) -> list:
    """Two sessions one after the other, each with groups of its own; what the group of the user is good for afterwards."""
    if adopted:
        dist.init_process_group("gloo", init_method="env://")
    sums = []
    for session in range(2):
        hora.init(device="cpu", timeout_s=30.0, **({} if adopted else {"init_method": f"{init_method}-{session}"}))
        sums.append(hora.all_reduce(torch.ones(5), algorithm="hierarchical").tolist())
        inside = hora.session().groups.by_node().inside.size()
        hora.shutdown()
    if adopted:
        last = torch.ones(1)
        dist.all_reduce(last)
        sums.append(last.tolist())
        dist.destroy_process_group()
    return [sums, inside, dist.is_initialized()]


@pytest.mark.parametrize("adopted", [False, True])
def test_groups_by_node_end_with_their_session(spawn_ranks, tmp_path, adopted):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
    arguments = {"adopted": adopted, "init_method": f"file://{tmp_path}/store"}
    ranks = [
        spawn_ranks(1, body_comes_and_goes, join=False, environ=place_on_node(rank, IN_TURNS) | meeting, **arguments) for rank in range(4)
    ]
    for rank in ranks:
        (outcome,) = rank.wait()
        assert outcome.kind == "passed", outcome
        assert outcome.result == [[[4.0] * 5] * 2 + [[4.0]] * adopted, 2, False]
