"""Horovod's operations on real ranks, against closed forms; and what they say when ranks do not agree."""

import random
import re
import threading
import time
import traceback
import weakref

import pytest
import torch
from hvd_kit import horovod

import hora
import hora.hvd as hvd
from hora.testing import run_ranks

DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


@run_ranks(1, 2, 3)
def test_every_reduction_of_every_type(world_size):
    with horovod() as (rank, size):
        for name in DTYPES:
            dtype = getattr(torch, name)
            for length in (1, 7, size):
                mine = torch.arange(1, length + 1).to(dtype) * (rank + 1)
                first = torch.arange(1, length + 1)
                total = size * (size + 1) // 2
                product = 1
                for each in range(1, size + 1):
                    product *= each
                average = first * total / size
                cases = {
                    hvd.Sum: first * total,
                    hvd.Average: average if dtype.is_floating_point else average.trunc(),
                    hvd.Min: first,
                    hvd.Max: first * size,
                    hvd.Product: first**size * product,
                }
                for op, expected in cases.items():
                    if op == hvd.Product and length > 2:
                        continue  # beyond what a byte holds
                    kept = mine.clone()
                    found = hvd.allreduce(mine, op=op)
                    assert found.dtype is dtype, (name, op)
                    assert torch.allclose(found.double(), expected.to(dtype).double(), rtol=1e-2), (name, op, found, expected)
                    assert torch.equal(mine, kept)
                    assert hvd.allreduce_(mine, op=op) is mine
                    assert torch.equal(mine, found)
                    mine = kept


@run_ranks(1, 2, 3)
def test_bool_is_any_and_all(world_size):
    with horovod() as (rank, size):
        mine = torch.tensor([True, False, rank == 0])
        for op, last in ((hvd.Sum, True), (hvd.Max, True), (hvd.Min, size == 1), (hvd.Product, size == 1)):
            assert hvd.allreduce(mine, op=op).tolist() == [True, False, last]
        with pytest.raises(ValueError, match="no average"):
            hvd.allreduce(mine)
        assert hvd.broadcast(mine, size - 1).tolist() == [True, False, size == 1]
        assert hvd.allgather(mine).tolist()[2::3] == [each == 0 for each in range(size)]


@run_ranks(2)
def test_factors_scale_before_and_after(world_size):
    with horovod() as (rank, _size):
        assert hvd.allreduce(torch.full((2,), float(rank + 1)), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0).tolist() == [6.0] * 2
        assert hvd.allreduce(torch.tensor([3, 5]), op=hvd.Sum, prescale_factor=0.5).tolist() == [2, 4]  # each cut towards zero first
        assert hvd.reducescatter(torch.ones(2), op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5).tolist() == [3.0]
        with pytest.warns(DeprecationWarning, match="replaced with `op`"):
            assert hvd.allreduce(torch.ones(1), average=False).item() == 2.0
        with pytest.raises(ValueError, match="supersedes average"):
            hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)


@run_ranks(1, 2, 3, 4)
def test_copies_and_exchanges(world_size):
    with horovod() as (rank, size):
        rows = [torch.full((each, 2), each, dtype=torch.bfloat16) for each in range(size)]
        assert torch.equal(hvd.allgather(rows[rank]), torch.cat(rows))
        one, two = hvd.grouped_allgather([torch.tensor([rank]), rows[rank]])
        assert one.tolist() == list(range(size))
        assert torch.equal(two, torch.cat(rows))
        sent = torch.full((3,), rank)
        assert hvd.broadcast(sent, size - 1).eq(size - 1).all()
        assert sent.eq(rank).all()
        assert hvd.broadcast_(sent, 0) is sent
        assert sent.eq(0).all()
        assert hvd.alltoall(torch.arange(2 * size) + 100 * rank).tolist() == [100 * f + 2 * rank + i for f in range(size) for i in range(2)]
        splits = torch.arange(size, dtype=torch.int32)
        received, counts = hvd.alltoall(torch.arange(int(splits.sum())) + 100 * rank, splits=splits)
        begin = rank * (rank - 1) // 2
        assert received.tolist() == [100 * f + begin + i for f in range(size) for i in range(rank)]
        assert counts.tolist() == [rank] * size
        assert counts.dtype is torch.int32
        length = size + 1
        part = hvd.reducescatter(torch.arange(float(length)) + rank, op=hvd.Sum)
        whole = torch.arange(float(length)) * size + size * (size - 1) / 2
        assert torch.equal(part, whole.tensor_split(size)[rank])
        mean, total = hvd.grouped_reducescatter([torch.ones(size), torch.ones(size)]), hvd.reducescatter(torch.ones(size), op=hvd.Sum)
        assert [m.item() for m in mean] == [1.0, 1.0]
        assert total.item() == size
        assert [t.tolist() for t in hvd.grouped_allreduce([torch.ones(2), torch.ones(1, dtype=torch.int64)], op=hvd.Sum)] == [
            [size] * 2,
            [size],
        ]


@run_ranks(1, 3)
def test_what_returns_at_once_is_a_number_whose_result_comes_later(world_size):
    """All forms at once, before any is waited for, in another order on each rank."""
    with horovod() as (rank, size):
        here, pair = torch.full((size,), rank), [torch.full((size,), rank), torch.full((size + 1, 2), 2.0 * rank)]
        replaced, spread, group = here.clone(), here.clone(), [each.clone() for each in pair]
        total = size * (size - 1) // 2
        begun = {
            "reduced": lambda name: hvd.allreduce_async_(replaced, op=hvd.Sum, name=name),
            "gathered": lambda name: hvd.allgather_async(here, name=name),
            "sent": lambda name: hvd.broadcast_async(here, size - 1, name=name),
            "spread": lambda name: hvd.broadcast_async_(spread, size - 1, name=name),
            "exchanged": lambda name: hvd.alltoall_async(here, name=name),
            "scattered": lambda name: hvd.reducescatter_async(here, op=hvd.Sum, name=name),
            "reduced group": lambda name: hvd.grouped_allreduce_async(pair, op=hvd.Sum, name=name),
            "replaced group": lambda name: hvd.grouped_allreduce_async_(group, op=hvd.Max, name=name),
            "gathered group": lambda name: hvd.grouped_allgather_async(pair, name=name),
            "scattered group": lambda name: hvd.grouped_reducescatter_async(pair, op=hvd.Sum, name=name),
        }
        names = random.Random(rank).sample(sorted(begun), len(begun))
        handles = {name: begun[name](name) for name in names}
        assert all(isinstance(handle, int) for handle in handles.values())
        found = {name: hvd.synchronize(handles[name]) for name in reversed(names)}
        assert found["reduced"] is replaced
        assert replaced.tolist() == [total] * size
        assert found["gathered"].tolist() == found["gathered group"][0].tolist() == [each for each in range(size) for _ in range(size)]
        assert found["sent"].tolist() == spread.tolist() == [size - 1] * size
        assert found["spread"] is spread
        received, counts = found["exchanged"]
        assert received.tolist() == list(range(size))
        assert (counts.dtype, counts.tolist()) == (torch.int32, [1] * size)
        assert found["scattered"].tolist() == found["scattered group"][0].tolist() == [total]
        assert [each.unique().tolist() for each in found["reduced group"]] == [[total], [2 * total]]
        assert [each is mine for each, mine in zip(found["replaced group"], group, strict=True)] == [True, True]
        assert [each.unique().tolist() for each in group] == [[size - 1], [2 * (size - 1)]]
        assert found["gathered group"][1].shape == (size * (size + 1), 2)
        assert found["scattered group"][1].shape == (1 + (rank == 0), 2)
        assert torch.equal(here, torch.full((size,), rank)), "only what ends in an underscore is written over"
        assert hvd.grouped_allreduce_(group, op=hvd.Min)[1] is group[1]


@run_ranks(2, 3)
def test_operations_meet_by_name_in_whatever_order(world_size):
    """Several rounds, so that names get numbers; every rank submits in its own order, and waits in another."""
    with horovod() as (rank, size):
        order = random.Random(rank)
        for _ in range(4):
            names = [f"t{n}" for n in range(40)]
            order.shuffle(names)
            handles = {name: hvd.allreduce_async(torch.full((int(name[1:]) + 1,), float(rank)), name=name, op=hvd.Sum) for name in names}
            gathered = hvd.allgather_async(torch.tensor([rank]), name="between")
            order.shuffle(names)
            for name in names:
                found = hvd.synchronize(handles[name])
                assert found.tolist() == [size * (size - 1) / 2] * (int(name[1:]) + 1)
            assert hvd.synchronize(gathered).tolist() == list(range(size))
            assert hvd.synchronize(handles["t0"]) is None


@run_ranks(2)
def test_poll_says_when_it_is_done(world_size):
    with horovod() as (rank, _):
        if rank == 1:
            hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(3), name="late")
        if rank == 0:
            for _ in range(20):
                assert not hvd.poll(handle)
            hvd.barrier()
        while not hvd.poll(handle):
            time.sleep(0.001)
        assert hvd.synchronize(handle).tolist() == [1.0] * 3


@run_ranks(2)
def test_threads_submit_side_by_side(world_size):
    with horovod() as (rank, _size):
        found = {}

        def work(number):
            for step in range(10):
                found[number, step] = hvd.allreduce(torch.full((2,), float(number)), name=f"{number}.{step}").tolist()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads if rank else reversed(threads):
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {(n, s): [float(n)] * 2 for n in range(4) for s in range(10)}


@run_ranks(2, 3)
def test_gradients_go_back_through_the_operations(world_size):
    with horovod() as (rank, size):
        x = torch.ones(2, requires_grad=True)
        (hvd.allreduce(x, op=hvd.Sum) * (rank + 1.0)).sum().backward()
        assert x.grad.tolist() == [size * (size + 1) / 2] * 2
        x = torch.ones(2, requires_grad=True)
        sum(hvd.grouped_allreduce([x, x * 2])).sum().backward()
        assert x.grad.tolist() == [3.0] * 2
        rows = torch.ones(rank + 1, 2, requires_grad=True)
        weights = torch.arange(float(size * (size + 1) // 2))[:, None]
        (hvd.allgather(rows) * weights * (rank + 1)).sum().backward()
        begin = rank * (rank + 1) // 2
        assert torch.allclose(rows.grad, (weights[begin : begin + rank + 1] * (size + 1) / 2).expand(-1, 2))
        x = torch.ones(2, requires_grad=True)
        (hvd.broadcast(x, 1) * (rank + 1.0)).sum().backward()
        assert x.grad.tolist() == [(size + 1) / 2 if rank == 1 else 0.0] * 2
        x = torch.ones(size, requires_grad=True)
        (hvd.alltoall(x) * (rank + 1.0)).sum().backward()
        assert x.grad.tolist() == [each + 1.0 for each in range(size)]
        x = torch.ones(size + 2, requires_grad=True)
        splits = torch.ones(size, dtype=torch.int32)
        received, _ = hvd.alltoall(x, splits)
        (received * (rank + 1.0)).sum().backward()
        assert x.grad.tolist() == [*(each + 1.0 for each in range(size)), 0.0, 0.0]
        x = torch.ones(size + 1, requires_grad=True)
        (hvd.reducescatter(x, op=hvd.Sum) * (rank + 1.0)).sum().backward()
        owners = torch.cat([torch.full_like(part, each + 1.0) for each, part in enumerate(torch.ones(size + 1).tensor_split(size))])
        assert torch.equal(x.grad, owners * size)
        x = torch.ones(size + 1, requires_grad=True)
        (hvd.reducescatter(x, prescale_factor=3.0) * (rank + 1.0)).sum().backward()
        assert torch.equal(x.grad, owners * 3)
        x = torch.ones(2, requires_grad=True)
        hvd.allreduce(x, prescale_factor=2.0, postscale_factor=3.0, compression=hvd.Compression.fp16).sum().backward()
        assert x.grad.tolist() == [6.0] * 2
        x, rows = torch.ones(1, requires_grad=True), torch.ones(rank + 1, 2, requires_grad=True)
        one, two = hvd.grouped_allgather([x, rows])
        (one.sum() + 2 * two.sum()).backward()
        assert (x.grad.tolist(), rows.grad.unique().tolist()) == ([1.0], [2.0])


@run_ranks(2, 3)
def test_join_lets_ranks_run_out_of_data(world_size):
    with horovod() as (rank, size):
        for step in range(rank + 2):
            total = hvd.allreduce(torch.full((3,), 1.0), name=f"s{step % 2}", op=hvd.Sum)
            mean = hvd.allreduce(torch.ones(2, dtype=torch.float64))
            there = size - max(0, step - 1)
            assert total.tolist() == [float(there)] * 3
            assert torch.allclose(mean, torch.full((2,), there / size, dtype=torch.float64))
        if rank == size - 1:
            for call, what in (
                (lambda: hvd.allgather(torch.ones(1)), "Allgather"),
                (lambda: hvd.broadcast(torch.ones(1), 0), "Broadcast"),
                (lambda: hvd.alltoall(torch.ones(size)), "Alltoall"),
                (lambda: hvd.reducescatter(torch.ones(size)), "Reducescatter"),
            ):
                others = re.escape(str(list(range(size - 1))))
                with pytest.raises(
                    hvd.HorovodInternalError, match=rf"{what} is not supported with Join at this time\. Tensor .*; joined: {others}"
                ):
                    call()
        assert hvd.join() == size - 1
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


@run_ranks(3, 4)
def test_process_sets_are_worlds_of_their_own(world_size):
    even, tail = hvd.ProcessSet(range(0, world_size, 2)), hvd.ProcessSet([world_size - 1, 1])
    with horovod(process_sets=[even, tail]) as (rank, size):
        assert (even.process_set_id, tail.process_set_id, hvd.global_process_set.ranks) == (1, 2, list(range(size)))
        assert tail.ranks == [1, size - 1]
        # In different orders on different ranks, and with the world's between.
        for mine in (even, tail) if rank % 2 else (tail, even):
            assert mine.included() == (rank in mine.ranks)
            assert mine.rank() == (mine.ranks.index(rank) if mine.included() else -1)
            if mine.included():
                assert hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum, name="x", process_set=mine).item() == sum(mine.ranks)
                assert hvd.broadcast(torch.tensor([rank]), mine.ranks[-1], process_set=mine).item() == mine.ranks[-1]
                assert (
                    hvd.allgather_object(rank)
                    if mine is None
                    else hvd.allgather(torch.tensor([rank]), process_set=mine).tolist() == mine.ranks
                )
            else:
                with pytest.raises(hvd.HorovodInternalError, match=f"Rank {rank} is not a member of the provided process set"):
                    hvd.allreduce(torch.ones(1), process_set=mine)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
        with pytest.raises(ValueError, match="HOROVOD_DYNAMIC_PROCESS_SETS"):
            hvd.add_process_set([0])
    assert even.process_set_id is None


@run_ranks(3)
def test_process_sets_come_and_go(world_size):
    with horovod(process_sets="dynamic") as (rank, size):
        assert hvd.ProcessSet([0, size - 1]).included() == (rank != 1), "before it is known, too"
        with pytest.raises(ValueError, match="has not been registered"):
            hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1), process_set=hvd.ProcessSet([0, 1]))
        for _ in range(2):
            pair = hvd.add_process_set([0, size - 1])
            for ranks in ([size - 1, 0], range(size)):
                with pytest.raises(ValueError, match="registered already"):
                    hvd.add_process_set(hvd.ProcessSet(ranks))
            if pair.included():
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2
            assert hvd.remove_process_set(pair)
            assert not hvd.remove_process_set(pair)
            with pytest.raises(hvd.HorovodInternalError, match="does not exist, or has not been registered"):
                hvd.allreduce(torch.ones(1), process_set=pair)
        assert not hvd.remove_process_set(hvd.global_process_set)


@run_ranks(3)
def test_ranks_that_do_not_agree_are_told_and_go_on(world_size):
    """On every rank: Horovod's words, the tensor, and which ranks said what."""
    with horovod() as (rank, size):
        odd = rank == size - 1
        cases = [
            (lambda: hvd.allreduce(torch.ones(3 + odd), name="x"), "ALLREDUCE tensor shapes: One rank sent a tensor of shape [3], but another",
             "'allreduce.x', shape: [3] on ranks 0 and 1, [4] on rank 2."),
            (lambda: hvd.allreduce(torch.ones(1, dtype=[torch.float32, torch.float64][odd]), name="x"), "data types: One rank had type float32, but",
             "'allreduce.x', type: float32 on ranks 0 and 1, float64 on rank 2."),
            (lambda: hvd.allreduce(torch.ones(1), op=[hvd.Sum, hvd.Min][odd], name="x"), "reduction operation: One rank sent reduction op 1, but",
             "'allreduce.x', reduction: Sum on ranks 0 and 1, Min on rank 2."),
            (lambda: hvd.allreduce(torch.ones(1), prescale_factor=1.0 + odd, name="x"), "prescale and/or postscale factors",
             "'allreduce.x', scale: [1.0, 1.0] on ranks 0 and 1, [2.0, 1.0] on rank 2."),
            (lambda: hvd.broadcast(torch.ones(1), int(odd), name="x"), "BROADCAST root ranks: One rank specified root rank 0, but",
             "'broadcast.x', root rank: 0 on ranks 0 and 1, 1 on rank 2."),
            (lambda: hvd.broadcast(torch.ones(3 + odd), 0, name="x"), "BROADCAST tensor shapes", "'broadcast.x', shape: [3] on ranks 0 and 1, [4]"),
            (lambda: hvd.allgather(torch.ones(2, 3 + odd), name="x"), "ALLGATHER tensor shapes: One rank sent a tensor with dimension 1 equal to 3",
             "'allgather.x', shape: [2, 3] on ranks 0 and 1, [2, 4] on rank 2."),
            (lambda: hvd.alltoall(torch.ones(size, 3 + odd), name="x"), "ALLTOALL tensor shapes", "'alltoall.x', shape: [3, 3] on ranks 0 and 1"),
            (lambda: hvd.reducescatter(torch.ones(size + odd), name="x"), "REDUCESCATTER tensor shapes", "'reducescatter.x', shape: [3] on"),
            (lambda: hvd.reducescatter(torch.ones(3), name="x", op=[hvd.Sum, hvd.Average][odd]), "reduction operation", "'reducescatter.x', redu"),
            (lambda: hvd.grouped_allreduce([torch.ones(2), torch.ones(3 + odd)], name="x"), "ALLREDUCE tensor shapes",
             "'allreduce.x[1]', shape: [3] on ranks 0 and 1, [4] on rank 2."),
            (lambda: hvd.grouped_allgather([torch.ones(2)] * (1 + odd), name="x"), "groups: One rank sent 1 tensors, but another rank sent 2",
             "'allgather.x', number of tensors: 1 on ranks 0 and 1, 2 on rank 2."),
        ]  # fmt: skip
        for call, words, found in cases:
            for _ in range(2):
                with pytest.raises(hvd.HorovodInternalError, match=re.escape(f"Mismatched {words}")) as caught:
                    call()
                assert f" Tensor {found}" in str(caught.value)
                assert re.search("on ranks 0 and 1, .* on rank 2", str(caught.value))
                assert isinstance(caught.value, RuntimeError)
                frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
                assert frames == ["test_ranks_that_do_not_agree_are_told_and_go_on", "<lambda>", "call"]  # the script's, and one of Hora's
        assert hvd.allreduce(torch.ones(1), name="x").item() == 1.0


@run_ranks(2)
def test_mistakes_are_refused_before_anything_is_sent(world_size):
    with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd.init\(\)."):
        hvd.rank()
    with horovod() as (rank, _):
        for call, error, text in (
            (lambda: hvd.allgather(torch.tensor(1.0)), IndexError, "no dimension"),
            (lambda: hvd.allreduce(torch.ones(2, 3).t()), ValueError, "Tensor is required to be contiguous"),
            (lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64)), ValueError, "is not supported"),
            (lambda: hvd.alltoall(torch.ones(3)), ValueError, "not an even multiple of the number of workers"),
            (
                lambda: hvd.alltoall(torch.ones(3), splits=torch.tensor([2, 2], dtype=torch.int32)),
                ValueError,
                "Sum of splits entries is greater",
            ),
            (lambda: hvd.alltoall(torch.ones(3), splits=torch.tensor([1, 2])), ValueError, "32-bit integer"),
            (lambda: hvd.reducescatter(torch.tensor(1.0)), ValueError, "does not support scalar inputs"),
            (lambda: hvd.reducescatter(torch.ones(2), op=hvd.Adasum), hvd.HorovodInternalError, "only Sum and Average"),
            (lambda: hvd.broadcast(torch.ones(1), 2), ValueError, "root_rank must be one of"),
            (lambda: hvd.allreduce(torch.ones(1), op=9), ValueError, "op must be one of"),
        ):
            with pytest.raises(error, match=text):
                call()
        if rank == 0:
            handle = hvd.allreduce_async(torch.ones(1), name="twice")
            with pytest.raises(ValueError, match=r"same name as another tensor.*Rank 0, tensor 'allreduce.twice'"):
                hvd.allreduce_async(torch.ones(1), name="twice")
        hvd.barrier()
        if rank != 0:  # not before: the first would be done at once, and the second allowed
            handle = hvd.allreduce_async(torch.ones(1), name="twice")
        assert hvd.synchronize(handle).item() == 1.0


@run_ranks(2, 3)
def test_empty_tensors_scalars_and_those_of_inference_mode(world_size):
    with horovod() as (rank, size):
        assert hvd.allreduce(torch.empty(3, 0)).shape == (3, 0)
        assert hvd.allreduce(torch.tensor(2.0)).shape == ()
        assert [t.shape for t in hvd.grouped_allreduce([torch.empty(0), torch.ones(2, 2), torch.tensor(1.0)])] == [(0,), (2, 2), ()]
        assert hvd.allgather(torch.empty(0, 3)).shape == (0, 3)
        assert hvd.alltoall(torch.empty(0)).shape == (0,)
        assert hvd.reducescatter(torch.ones(1)).shape == (1 if rank == 0 else 0,)
        assert hvd.broadcast(torch.empty(0), 0).shape == (0,)
        with torch.inference_mode():
            score = hvd.allreduce(torch.full((2,), float(rank)), op=hvd.Sum)
            assert score.tolist() == [size * (size - 1) / 2] * 2
            assert hvd.allgather(score).shape == (2 * size,)
            assert hvd.broadcast_(score, 0) is score
        weight = torch.nn.Parameter(torch.full((2,), float(rank)))
        hvd.broadcast_(weight, 1)
        assert (weight.requires_grad, weight.tolist()) == (True, [1.0, 1.0])
        (weight * hvd.allreduce(torch.ones(2))).sum().backward()  # what comes back may be kept for backward
        assert weight.grad.tolist() == [1.0, 1.0]


@run_ranks(2)
def test_sparse_tensors_are_added_up(world_size):
    with horovod() as (rank, _size):
        mine = torch.sparse_coo_tensor([[rank, 3]], torch.tensor([[1.0, 2.0], [4.0, 4.0]]), (5, 2), check_invariants=False)
        expected = torch.zeros(5, 2)
        expected[:2] = torch.tensor([1.0, 2.0])
        expected[3] = 8.0
        assert torch.equal(hvd.allreduce(mine, op=hvd.Sum).to_dense(), expected)
        assert torch.equal(hvd.synchronize(hvd.sparse_allreduce_async(mine, "s", hvd.Average)).to_dense(), expected / 2)


@run_ranks(1, 2, 4)
def test_adasum_adds_what_is_orthogonal_and_averages_what_agrees(world_size):
    with horovod() as (rank, size):
        mine = torch.zeros(size + 1)
        mine[rank] = rank + 1.0
        assert torch.allclose(hvd.allreduce(mine, op=hvd.Adasum), torch.tensor([*range(1, size + 1), 0.0]))
        same = torch.tensor([1.0, -2.0], dtype=torch.float16)
        assert hvd.allreduce(same, op=hvd.Adasum, name="same").tolist() == [1.0, -2.0]


@run_ranks(3)
def test_adasum_wants_a_power_of_two(world_size):
    with horovod(), pytest.raises(NotImplementedError, match="non-power of 2 ranks is not supported yet; there are 3"):
        hvd.allreduce(torch.ones(1), op=hvd.Adasum)


@run_ranks(1, 2)
def test_worlds_begin_and_end_in_one_process(world_size):
    left = []
    for _ in range(3):
        with horovod() as (rank, size):
            hvd.init()
            given = torch.ones(1)
            gone, handle = weakref.ref(given), hvd.allreduce_async_(given)
            assert [hvd.synchronize(each) for each in left] == [None] * len(left), "no other has had their numbers"
            left.append(handle)
            del given
            assert hvd.is_initialized()
            assert (rank, size) == (hora.rank(), hora.world_size())
            assert (hvd.local_size(), hvd.cross_size(), hvd.cross_rank(), hvd.is_homogeneous()) == (size, 1, 0, True)
            assert hvd.local_rank() == rank
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
        assert not hvd.is_initialized()
        with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd.init\(\)."):
            hvd.rank()
        assert gone() is None, "the tensors of operations whose results nobody took are let go of"
    assert hora.is_initialized()  # it was there before
    assert not hvd.mpi_enabled()
    assert hvd.gloo_built()


@run_ranks(2)
def test_a_rank_that_leaves_is_named_to_the_others(world_size):
    with horovod() as (rank, _):
        if rank == 1:
            hvd.shutdown()
            return
        with pytest.raises(
            hvd.HorovodInternalError,
            match=r"Horovod has been shut down. Rank 1 called hvd.shutdown\(\).* Rank \d (waited|asked) for tensor 'allreduce.alone'",
        ):
            hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="alone"))
        with pytest.raises(hvd.HorovodInternalError, match=r"has been shut down.* asked for tensor 'allreduce.late' after that"):
            hvd.allreduce(torch.ones(1), name="late")


@run_ranks(2)
def test_worlds_of_some_ranks_are_refused_and_those_of_all_are_not(world_size):
    for everybody in ([1, 0], []):
        hvd.init(comm=everybody)
        assert hvd.size() == 2
        hvd.shutdown()
    with pytest.raises(ValueError, match="comm must have all 2 ranks"):
        hvd.init(comm=[0])
    with pytest.raises(ValueError, match="entry number 1 is a duplicate"):
        hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([0])])
    assert not hvd.is_initialized()


@run_ranks(4, nodes=(0, 1, 0, 1))
def test_ranks_of_several_nodes_talk_over_gloo():
    with horovod() as (rank, size):
        assert (hvd.local_size(), hvd.cross_size(), hvd.cross_rank()) == (2, 2, rank % 2)
        for step in range(4):
            assert hvd.allreduce(torch.full((3,), float(rank)), name="x").tolist() == [(size - 1) / 2] * 3
            names = [f"a long name, so that the message is longer than a frame {'.' * 100} {n} {step // 3}" for n in range(30)]
            handles = [hvd.allreduce_async(torch.ones(2), name=name) for name in (names if rank else reversed(names))]
            assert all(hvd.synchronize(handle).eq(1).all() for handle in handles)


@run_ranks(2)
def test_an_engine_that_has_nothing_to_do_costs_nothing(world_size):
    with horovod():
        hvd.allreduce(torch.ones(1))
        hvd.barrier()
        before = time.thread_time(), time.process_time()
        time.sleep(0.3)
        used = time.process_time() - before[1]
    assert used < 0.03


@run_ranks(2)
def test_calls_of_hora_in_their_own_order_go_on_beside(world_size):
    with horovod() as (rank, _size):
        handles = []
        for step in range(20):
            handles.append(hvd.allreduce_async(torch.full((5,), float(step)), name=f"h{step}"))
            assert hora.all_reduce(torch.tensor([float(step + rank)])).item() == 2 * step + 1
        assert [hvd.synchronize(handle)[0].item() for handle in handles] == list(range(20))
