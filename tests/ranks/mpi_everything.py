"""Everything that backend mpi promises, on ranks that an MPI has started: rank 0 prints `ok NAME` for each check; one that fails ends the job."""

import os
import re
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hora
import hora.mpi  # makes the name known
from hora.comm.torch_private import all_gather_single, reduce_scatter_single

torch.set_num_threads(1)
dist.init_process_group("mpi", timeout=timedelta(seconds=30))
RANK, SIZE = dist.get_rank(), dist.get_world_size()
RANKS = range(SIZE)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SHAPES = ((), (0,), (1,), (7,), (3, 5), (1001,))
Op = dist.ReduceOp


def of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a rank gives: small numbers, so that all sums and products are exact."""
    numel = torch.Size(shape).numel()
    return ((torch.arange(numel) * 3 + rank) % 3 + 1).to(dtype).reshape(shape)


def stacked(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([of(rank, shape, torch.float64 if dtype.is_floating_point else torch.int64) for rank in RANKS])


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=0, atol=0)


def all_reduce_sums_and_the_rest() -> None:
    combine = {Op.SUM: lambda x: x.sum(0), Op.PRODUCT: lambda x: x.prod(0), Op.MAX: lambda x: x.amax(0), Op.MIN: lambda x: x.amin(0)}
    for dtype in FLOATS + INTEGERS:
        for shape in SHAPES:
            for op, how in combine.items():
                tensor = of(RANK, shape, dtype)
                dist.all_reduce(tensor, op)
                same(tensor, how(stacked(shape, dtype)))


def all_reduce_averages() -> None:
    for dtype in FLOATS:
        tensor = of(RANK, (7,), dtype)
        dist.all_reduce(tensor, Op.AVG)
        same(tensor, (stacked((7,), dtype).sum(0).float() / SIZE))


def all_reduce_by_bits() -> None:
    for dtype in INTEGERS:
        everybody = stacked((7,), dtype)
        for op, how in ((Op.BAND, torch.bitwise_and), (Op.BOR, torch.bitwise_or), (Op.BXOR, torch.bitwise_xor)):
            wanted = everybody[0]
            for other in everybody[1:]:
                wanted = how(wanted, other)
            tensor = of(RANK, (7,), dtype)
            dist.all_reduce(tensor, op)
            same(tensor, wanted)


def all_reduce_of_booleans() -> None:
    mine = torch.tensor([True, False, RANK == 0])
    for op, wanted in (
        (Op.SUM, [True, False, True]),
        (Op.MAX, [True, False, True]),
        (Op.PRODUCT, [True, False, SIZE == 1]),
        (Op.MIN, [True, False, SIZE == 1]),
    ):
        tensor = mine.clone()
        dist.all_reduce(tensor, op)
        assert tensor.tolist() == wanted, (op, tensor)


def half_precision_is_rounded_once() -> None:
    # 256 + 1 in bfloat16 is 256 again: added one by one the ones would be lost.
    tensor = torch.tensor([256.0 if RANK == 0 else 1.0], dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    same(tensor, torch.tensor([256.0 + SIZE - 1]))


def all_ranks_have_the_same_bits() -> None:
    for numel in (1, 7, 1000, 100_003):
        tensor = torch.randn(numel, generator=torch.Generator().manual_seed(RANK))
        dist.all_reduce(tensor)
        everybody = [torch.empty_like(tensor) for _ in RANKS]
        dist.all_gather(everybody, tensor)
        assert all(torch.equal(tensor, other) for other in everybody)


def tensors_that_are_not_contiguous() -> None:
    whole = torch.zeros(4, 6)
    part = whole.t()[1:4]
    part += RANK
    dist.all_reduce(part)
    same(part, torch.full((3, 4), float(sum(RANKS))))
    assert whole.sum() == 12 * sum(RANKS)
    rows = torch.full((5, 2), float(RANK))[:, 0]
    dist.broadcast(rows, SIZE - 1)
    same(rows, torch.full((5,), SIZE - 1.0))


def large_tensors() -> None:
    tensor = torch.full((3_000_001,), RANK + 1.0)
    dist.all_reduce(tensor)
    same(tensor, torch.full((3_000_001,), float(sum(RANKS) + SIZE)))


def asynchronous_calls_in_order() -> None:
    tensors = [torch.full((100,), float(RANK + number)) for number in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        assert work.is_completed()
        same(tensor, torch.full((100,), float(sum(RANKS) + SIZE * number)))
    work = dist.all_reduce(torch.ones(3), async_op=True)
    same(work.get_future().wait()[0], torch.full((3,), float(SIZE)))


def broadcast_and_reduce() -> None:
    for root in RANKS:
        for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
            tensor = of(RANK, (3,), dtype)
            dist.broadcast(tensor, root)
            same(tensor, of(root, (3,), dtype))
        for dtype in FLOATS:
            tensor = of(RANK, (3,), dtype)
            dist.reduce(tensor, root)
            same(tensor, stacked((3,), dtype).sum(0) if root == RANK else of(RANK, (3,), dtype))


def reduce_scatter() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for numel in (0, 1, 5):
            parts = [of(RANK + part, (numel,), dtype) for part in RANKS]
            wanted = torch.stack([of(rank + RANK, (numel,), torch.float64) for rank in RANKS]).sum(0)
            output = torch.empty(numel, dtype=dtype)
            dist.reduce_scatter(output, parts)
            same(output, wanted)
            output = torch.empty(numel, dtype=dtype)
            reduce_scatter_single(output, torch.cat(parts))
            same(output, wanted)
    whole = torch.arange(2.0 * SIZE)
    reduce_scatter_single(whole[2 * RANK : 2 * RANK + 2], whole, Op.AVG)
    same(whole[2 * RANK : 2 * RANK + 2], torch.arange(2.0 * RANK, 2 * RANK + 2))


def all_gather() -> None:
    for dtype in (*FLOATS, torch.bool, torch.int16):
        outputs = [torch.empty(3, dtype=dtype) for _ in RANKS]
        dist.all_gather(outputs, of(RANK, (3,), dtype))
        for rank, output in enumerate(outputs):
            same(output, of(rank, (3,), dtype))
    whole = torch.full((SIZE, 3), -1.0)
    whole[RANK] = RANK
    all_gather_single(whole, whole[RANK])  # as FSDP does: the input is part of the output
    same(whole, torch.arange(float(SIZE))[:, None].expand(SIZE, 3))
    all_gather_single(torch.empty(0), torch.empty(0))
    with dist._coalescing_manager(async_ops=True) as manager:
        outputs = [torch.empty(2 * SIZE) for _ in range(3)]
        for number, output in enumerate(outputs):
            all_gather_single(output, torch.full((2,), float(RANK + number)))
    manager.wait()
    for number, output in enumerate(outputs):
        same(output, torch.arange(float(SIZE)).repeat_interleave(2) + number)


def gather_and_scatter() -> None:
    for root in RANKS:
        outputs = [torch.empty(2) for _ in RANKS] if root == RANK else None
        dist.gather(torch.full((2,), float(RANK)), outputs, root)
        assert outputs is None or [output[1].item() for output in outputs] == list(RANKS)
        output = torch.empty(2, dtype=torch.bfloat16)
        dist.scatter(output, [torch.full((2,), 1.0 + rank, dtype=torch.bfloat16) for rank in RANKS] if root == RANK else None, root)
        same(output, torch.full((2,), 1.0 + RANK))


def all_to_all() -> None:
    outputs = [torch.empty(1 + rank + RANK, dtype=torch.int16) for rank in RANKS]
    dist.all_to_all(outputs, [torch.full((1 + rank + RANK,), 10 * RANK + rank, dtype=torch.int16) for rank in RANKS])
    for rank, output in enumerate(outputs):
        same(output, torch.full((1 + rank + RANK,), 10 * rank + RANK))
    output = torch.empty(2 * SIZE)
    dist.all_to_all_single(output, torch.full((2 * SIZE,), float(RANK)))
    same(output, torch.arange(float(SIZE)).repeat_interleave(2))
    sizes = [rank + RANK for rank in RANKS]  # rows of two; rank 0 sends itself none
    output = torch.empty(sum(sizes), 2)
    dist.all_to_all_single(output, torch.full((sum(sizes), 2), float(RANK)), sizes, sizes)
    same(output[:, 0], torch.cat([torch.full((size,), float(rank)) for rank, size in zip(RANKS, sizes, strict=True)]))


def messages() -> None:
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    given, taken = torch.full((300_000,), float(RANK)), torch.empty(300_000)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, given, right), dist.P2POp(dist.irecv, taken, left)]):
        work.wait()
    same(taken, torch.full((300_000,), float(left)))
    works = [dist.isend(torch.tensor([tag]), right, tag=tag) for tag in (7, 8)]
    for tag in (8, 7):  # another order than they were sent in
        taken = torch.empty(1, dtype=torch.int64)
        dist.recv(taken, left, tag=tag)
        assert taken.item() == tag
    for work in works:
        work.wait()
    work = dist.isend(torch.tensor([float(RANK)]), 0) if RANK else None
    dist.barrier()  # all messages are there before anybody asks for them
    if RANK == 0:
        heard = set()
        for _ in RANKS[1:]:
            taken = torch.empty(2)[::2]
            source = dist.recv(taken)
            assert taken.item() == source
            heard.add(source)
        assert heard == set(RANKS[1:])
    if work is not None:
        work.wait()


def a_message_of_another_size_is_refused() -> None:
    if RANK == 0:
        dist.send(torch.ones(2), 1)
    elif RANK == 1:
        refused(lambda: dist.recv(torch.empty(3), 0), "takes 12 bytes, but 8 came")


def objects() -> None:
    everything = [None] * SIZE
    dist.all_gather_object(everything, {"rank": RANK})
    assert everything == [{"rank": rank} for rank in RANKS]
    box = [RANK]
    dist.broadcast_object_list(box, SIZE - 1)
    assert box == [SIZE - 1]


def groups_of_some_ranks() -> None:
    first = dist.new_group([0, 1])
    last = dist.new_group([SIZE - 1, 0])  # torch sorts them
    if RANK in (0, 1):
        tensor = torch.tensor([float(RANK + 1)])
        dist.all_reduce(tensor, group=first)
        assert tensor.item() == 3
    if RANK in (0, SIZE - 1):
        tensor = torch.tensor([float(RANK)])
        dist.broadcast(tensor, SIZE - 1, group=last)
        assert tensor.item() == SIZE - 1
    everybody = dist.new_group()
    dist.barrier(everybody)
    for group in (first, last, everybody):
        dist.destroy_process_group(group)


def refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(words)):
        call()


def calls_that_differ_are_refused_on_all_ranks() -> None:
    def differ() -> None:
        if RANK == 0:
            dist.broadcast(torch.ones(3), 0)
        else:
            dist.all_reduce(torch.ones(3))

    refused(differ, "rank 0: broadcast of 12 bytes with root 0 (12); rank 1")
    refused(lambda: dist.all_reduce(torch.ones(3 if RANK else 4)), "rank 0: all_reduce of 16 bytes float32 SUM (16); rank 1")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # the group is as good as before
    assert tensor.item() == SIZE


def what_cannot_be_combined_is_refused() -> None:
    refused(lambda: dist.all_reduce(torch.ones(1), Op.BAND), "cannot reduce float32 by BAND")
    refused(lambda: dist.all_reduce(torch.ones(1, dtype=torch.int32), Op.AVG), "cannot reduce int32 by AVG")
    refused(lambda: dist.all_reduce(torch.ones(1, dtype=torch.uint16)), "can reduce float32")


def train(wrap, rows: slice) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    wrapped, optimizer = wrap(model), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        inputs, targets = torch.randn(12, 20, generator=generator), torch.randn(12, 5, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def distributed_data_parallel_equals_one_process() -> None:
    share = 12 // SIZE
    alone, mine = train(lambda model: model, slice(None)), slice(RANK * share, (RANK + 1) * share)
    for options in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.001}):
        together = train(lambda model, options=options: DistributedDataParallel(model, **options), mine)
        torch.testing.assert_close(together, alone)


def fully_sharded_data_parallel_equals_one_process() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (SIZE,))
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    wanted = model.weight.detach() - 0.1 * torch.ones(5, 6)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.full_tensor().detach(), wanted)


def hora_works_on_the_group_of_a_script() -> None:
    session = hora.init(timeout_s=60.0)
    assert (session.rank, session.world_size, session.backend) == (RANK, SIZE, "mpi")
    assert hora.all_reduce(torch.ones(1)).item() == SIZE
    hora.shutdown()


def nothing_listens_beyond_this_machine() -> None:
    if "HORA_MPI" in os.environ:  # ranks inherit what mpiexec listens at
        listening = [each.laddr.ip for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
        assert all(address.startswith("127.") for address in listening), listening


def nothing_would_be_left_of_a_rank_that_is_killed() -> None:
    """The memory that MPICH shares between ranks has no name any more once all have it."""
    segments = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/mpich" in line]
    assert all(line.endswith("(deleted)") for line in segments), segments


CHECKS = [
    all_reduce_sums_and_the_rest, all_reduce_averages, all_reduce_by_bits, all_reduce_of_booleans, half_precision_is_rounded_once,
    all_ranks_have_the_same_bits, tensors_that_are_not_contiguous, large_tensors, asynchronous_calls_in_order, broadcast_and_reduce,
    reduce_scatter, all_gather, gather_and_scatter, all_to_all, messages, a_message_of_another_size_is_refused, objects, groups_of_some_ranks,
    calls_that_differ_are_refused_on_all_ranks, what_cannot_be_combined_is_refused, distributed_data_parallel_equals_one_process,
    fully_sharded_data_parallel_equals_one_process, hora_works_on_the_group_of_a_script, nothing_listens_beyond_this_machine,
    nothing_would_be_left_of_a_rank_that_is_killed,
]  # fmt: skip

if __name__ == "__main__":
    assert dist.get_backend() == "mpi"
    for check in CHECKS:
        try:
            check()
        except BaseException:
            sys.stderr.write(f"rank {RANK} failed in {check.__name__}\n{traceback.format_exc()}")
            raise
        dist.barrier()
        if RANK == 0:
            sys.stdout.write(f"ok {check.__name__}\n")
    dist.destroy_process_group()
