"""Backend shm as torch.distributed sees it: each collective against its definition, with the C kernel and without, alone and together."""

import os
import signal
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hora
from hora import env
from hora.comm.backends.queued import QueuedWork
from hora.comm.backends.shm import build
from hora.comm.backends.shm import group as group_module
from hora.comm.backends.shm.kernel import Kernel
from hora.comm.backends.shm.pure import Pure
from hora.comm.session import session
from hora.comm.torch_private import all_gather_single, reduce_scatter_single
from hora.testing import run_ranks

ENGINES = {"kernel": "1", "wide": "1", "pure": "0"}
DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
SIZES = [0, 1, 7, 1023, 4096, 600_011]
TORCH_OPS = {
    "sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "product": dist.ReduceOp.PRODUCT, "avg": dist.ReduceOp.AVG,
    "band": dist.ReduceOp.BAND, "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR,
}  # fmt: skip


def group_with(engine: str, timeout_s: float = 20.0) -> dist.ProcessGroup:
    """A group of all ranks; with `mixed` every second rank does without the kernel, with `wide` the kernel uses several threads."""
    kept = os.environ.get(env.SHM_KERNEL)
    wanted = ["kernel", "pure"][hora.rank() % 2] if engine == "mixed" else engine
    os.environ[env.SHM_KERNEL] = ENGINES[wanted]
    build.load_kernel.cache_clear()
    try:
        hora.register_backends()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group_module, "lanes_for", lambda size: 3 if engine == "wide" else 1)
            group = dist.new_group(backend="shm", timeout=timedelta(seconds=timeout_s))
    finally:
        os.environ.pop(env.SHM_KERNEL) if kept is None else os.environ.update({env.SHM_KERNEL: kept})
        build.load_kernel.cache_clear()
    assert type(group._engine) is (Pure if wanted == "pure" else Kernel)
    assert group._engine.segment.num_lanes == (3 if engine == "wide" else 1)
    return group


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 4, (numel,), generator=generator).to(dtype)


def combined(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """In the order of the ranks, half precision in float32."""
    dtype = parts[0].dtype
    if dtype is torch.bool:
        return torch.stack(parts).all(0) if op in ("product", "min") else torch.stack(parts).any(0)
    combine = {"sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}.get(op)
    combine = combine or {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[op]
    wide = [part.float() if dtype in (torch.float16, torch.bfloat16) else part for part in parts]
    total = wide[0]
    for part in wide[1:]:
        total = combine(total, part)
    return (total / len(parts) if op == "avg" else total).to(dtype)


def ops_for(dtype: torch.dtype) -> list[str]:
    if dtype is torch.bool:
        return ["sum", "product", "min", "max"]
    return ["sum", "product", "min", "max", *(["avg"] if dtype.is_floating_point else ["band", "bor", "bxor"])]


@pytest.mark.parametrize("engine", ["kernel", "wide", "pure", "mixed"])
@run_ranks(1, 2, 3, 4)
def test_all_reduce_combines_in_the_order_of_the_ranks(engine, world_size):
    group = group_with(engine)
    for name in DTYPES:
        dtype = getattr(torch, name)
        for numel in SIZES if name in ("float32", "bfloat16") else SIZES[:4]:
            parts = [values(rank, numel, dtype) for rank in range(world_size)]
            for op in ops_for(dtype) if numel < 5000 else ["sum"]:
                found = parts[hora.rank()].clone()
                dist.all_reduce(found, TORCH_OPS[op], group=group)
                assert torch.equal(found, combined(parts, op)), (name, numel, op)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("engine", ["kernel", "wide", "pure", "mixed"])
@run_ranks(1, 2, 3, 4)
def test_copies_arrive_as_they_were_sent(engine, world_size):
    group, rank = group_with(engine), hora.rank()
    for name in ("float32", "bool", "complex64"):
        dtype = getattr(torch, name)
        for numel in (0, 1, 7, 300_001):
            parts = [values(other, numel, torch.float32).to(dtype) for other in range(world_size)]
            for src in range(world_size):
                found = parts[rank].clone()
                dist.broadcast(found, src, group=group)
                assert torch.equal(found, parts[src])
            together = torch.empty(world_size * numel, dtype=dtype)
            all_gather_single(together, parts[rank], group=group)
            assert torch.equal(together, torch.cat(parts))
            each = [torch.empty(numel, dtype=dtype) for _ in range(world_size)]
            dist.all_gather(each, parts[rank], group=group)
            assert all(map(torch.equal, each, parts))
            lists = [torch.empty(numel, dtype=dtype) for _ in range(world_size)] if rank == world_size - 1 else None
            dist.gather(parts[rank], lists, dst=world_size - 1, group=group)
            assert lists is None or all(map(torch.equal, lists, parts))
            mine = torch.empty(numel, dtype=dtype)
            dist.scatter(mine, parts if rank == 0 else None, src=0, group=group)
            assert torch.equal(mine, parts[rank])
    dist.destroy_process_group(group)


@pytest.mark.parametrize("engine", ["kernel", "wide", "pure", "mixed"])
@run_ranks(1, 2, 3, 4)
def test_parts_of_sums_and_exchanges_go_to_their_ranks(engine, world_size):
    group, rank = group_with(engine), hora.rank()
    for numel in (0, 1, 7, 300_001):
        inputs = [[values(10 * sender + to, numel, torch.float32) for to in range(world_size)] for sender in range(world_size)]
        expected = combined([inputs[sender][rank] for sender in range(world_size)], "sum")
        for give in (torch.cat(inputs[rank]), torch.stack(inputs[rank])):
            found = torch.empty(numel)
            reduce_scatter_single(found, give, group=group)
            assert torch.equal(found, expected)
        found = torch.empty(numel)
        dist.reduce_scatter(found, [part.clone() for part in inputs[rank]], group=group)
        assert torch.equal(found, expected)
        uneven = [values(other, numel + other, torch.float32) for other in range(world_size)]
        received = [torch.empty(numel + rank) for _ in range(world_size)]
        dist.all_to_all(received, uneven, group=group)
        assert all(torch.equal(part, uneven[rank]) for part in received)
        flat = torch.empty((numel + rank) * world_size)
        sizes = [numel + other for other in range(world_size)]
        dist.all_to_all_single(flat, torch.cat(uneven), [numel + rank] * world_size, sizes, group=group)
        assert torch.equal(flat, torch.cat([uneven[rank]] * world_size))
        total = values(rank, numel, torch.float32)
        kept = total.clone()
        dist.reduce(total, world_size - 1, group=group)
        everybody = combined([values(other, numel, torch.float32) for other in range(world_size)], "sum")
        assert torch.equal(total, everybody if rank == world_size - 1 else kept)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("engine", ["kernel", "pure", "mixed"])
@run_ranks(2, 3)
def test_messages_of_all_sizes_and_tags_meet(engine, world_size):
    group, rank = group_with(engine), hora.rank()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for numel in (0, 1, 10, 70_000, 1_000_003):
        sent, received = values(rank, numel, torch.float32), torch.empty(numel)
        works = [dist.isend(sent, right, group=group), dist.irecv(received, left, group=group)]
        for work in works:
            work.wait()
        assert torch.equal(received, values(left, numel, torch.float32))
    first, second = torch.empty(200_000), torch.empty(3)
    works = [dist.isend(torch.ones(200_000), right, group=group, tag=1), dist.isend(torch.full((3,), 2.0), right, group=group, tag=2)]
    dist.recv(second, left, group=group, tag=2)  # the one behind
    dist.recv(first, left, group=group, tag=1)
    for work in works:
        work.wait()
    assert first.eq(1).all()
    assert second.eq(2).all()
    if rank == 0:
        others = set()
        for _ in range(world_size - 1):
            others.add(dist.recv(first, None, group=group))
        assert others == set(range(1, world_size))
    else:
        dist.send(first, 0, group=group)
    work = dist.isend(first, right, group=group, tag=3)  # goes on while this rank is elsewhere
    dist.barrier(group=group)
    dist.recv(first, left, group=group, tag=3)
    work.wait()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("engine", ["kernel", "wide", "pure"])
@run_ranks(2, 3)
def test_calls_that_differ_are_refused_and_the_group_goes_on(engine, world_size):
    group, rank = group_with(engine), hora.rank()
    calls = [
        lambda: dist.all_reduce(torch.ones(3 + rank % 2), group=group),
        lambda: dist.all_reduce(torch.ones(3, dtype=[torch.float32, torch.int32][rank % 2]), group=group),
        lambda: dist.all_reduce(torch.ones(3), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank % 2], group=group),
        lambda: dist.broadcast(torch.ones(3), rank % 2, group=group),
        lambda: dist.broadcast(torch.ones(3), 0, group=group) if rank == 0 else dist.all_reduce(torch.ones(3), group=group),
        lambda: dist.all_reduce(torch.ones(1_000_000 + rank % 2), group=group),
        lambda: dist.all_to_all([torch.ones(2) for _ in range(world_size)], [torch.ones(2 + rank) for _ in range(world_size)], group=group),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"all ranks (of a group )?must (make the same call|expect what the others send)"):
            call()
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        assert tensor.eq(world_size).all()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("engine", ["kernel", "pure"])
@run_ranks(2)
def test_layouts_and_async_calls(engine):
    group = group_with(engine)
    grid = torch.arange(24.0).view(4, 6).t()
    dist.all_reduce(grid, group=group)
    assert torch.equal(grid, 2 * torch.arange(24.0).view(4, 6).t())
    single = torch.ones(2)[::2]  # contiguous, for want of a second element
    dist.broadcast(single, 0, group=group)
    dist.all_reduce(single, group=group)
    assert single.item() == 2.0
    point = torch.tensor(1.5)
    dist.all_reduce(point, group=group)
    assert point == 3.0
    tensors = [torch.full((1000,), float(number)) for number in range(20)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    last = torch.ones(3)
    dist.all_reduce(last, group=group)  # behind all of them
    assert all(work.is_completed() for work in works)
    assert all(tensor.eq(2 * number).all() for number, tensor in enumerate(tensors))
    future = dist.all_reduce(torch.ones(2), group=group, async_op=True).get_future().then(lambda done: done.value()[0] * 10)
    assert future.wait().tolist() == [20.0, 20.0]
    output = torch.full((6,), float(hora.rank()))
    all_gather_single(output, output[3 * hora.rank() : 3 * hora.rank() + 3], group=group)  # its own place in the output, as FSDP does
    assert output.tolist() == [0.0] * 3 + [1.0] * 3
    dist.destroy_process_group(group)


@pytest.mark.parametrize("engine", ["kernel", "wide", "pure", "mixed"])
@run_ranks(1, 2, 3, 4)
def test_a_call_in_two_halves_comes_before_those_after_it(engine, world_size):
    group, rank = group_with(engine), hora.rank()

    def post(number: int):
        said = [torch.zeros(4, dtype=torch.float64) for _ in range(world_size)]
        return said, group.post_all_gather(said, torch.full((4,), 10.0 * number + rank, dtype=torch.float64))

    def check(said: list[torch.Tensor], number: int) -> None:
        assert [values.tolist() for values in said] == [[10.0 * number + other] * 4 for other in range(world_size)]

    for number in range(30):
        said, posted = post(number)
        if number % 3 == 1:  # by a call that is waited for
            dist.all_reduce(tensor := torch.ones(5 + 100_000 * (number % 2)), group=group)
            check(said, number)
            assert tensor.eq(world_size).all()
        elif number % 3 == 2:  # by one that is not, while another one finds no room
            work = dist.all_reduce(tensor := torch.ones(5), group=group, async_op=True)
            assert posted.wait()
            check(said, number)
            work.wait()
            assert tensor.eq(world_size).all()
        assert posted.wait()
        assert posted.wait()
        check(said, number)
    too_large = torch.zeros(group._engine.segment.slot_bytes + 1, dtype=torch.uint8)
    assert group.post_all_gather([too_large] * world_size, too_large) is None
    dist.destroy_process_group(group)


@pytest.mark.parametrize("engine", ["kernel", "pure"])
@run_ranks(2)
def test_a_call_in_two_halves_fails_as_others_do(engine):
    group, said = group_with(engine, timeout_s=1.0), [torch.zeros(2), torch.zeros(2)]
    if hora.rank() == 0:
        posted = group.post_all_gather(said, torch.ones(2))
        with pytest.raises(RuntimeError, match="must make the same call"):
            posted.wait()
    else:
        with pytest.raises(RuntimeError, match="must make the same call"):
            dist.all_reduce(torch.ones(2), group=group)
    dist.all_reduce(tensor := torch.ones(2), group=group)
    assert tensor.eq(2).all()
    hora.barrier()
    if hora.rank() == 0:
        posted = group.post_all_gather(said, torch.ones(2))
        time.sleep(1.0)  # as backward may take; the deadline counts from before
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"timed out: rank 0 waited 1\.0 s for rank 1"):
            posted.wait()
        assert time.monotonic() - began < 0.7
        with pytest.raises(RuntimeError, match="of no use any more"):
            group.post_all_gather(said, torch.ones(2))
        with pytest.raises(RuntimeError, match="of no use any more"):
            dist.all_reduce(torch.ones(2), group=group)
    hora.barrier()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("engine", ["kernel", "pure"])
@run_ranks(2)
def test_a_signal_is_heard_by_who_waits_for_the_second_half(engine):
    def ring(*_):
        raise KeyboardInterrupt

    group, said = group_with(engine, timeout_s=10.0), [torch.zeros(2), torch.zeros(2)]
    if hora.rank() == 0:
        posted = group.post_all_gather(said, torch.ones(2))
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            posted.wait()
        signal.signal(signal.SIGALRM, before)
    hora.barrier()
    if hora.rank() == 1:
        posted = group.post_all_gather(said, torch.full((2,), 2.0))
    assert posted.wait()
    assert [values.tolist() for values in said] == [[1.0, 1.0], [2.0, 2.0]]
    hora.barrier()
    dist.destroy_process_group(group)


@contextmanager
def signalled(when, act):
    """Inside the `with` block a signal comes as soon as `when()` is true, whose handler calls `act`."""

    def ring():
        while not when():
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    before, thread = signal.signal(signal.SIGALRM, lambda *_: act()), threading.Thread(target=ring)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGALRM, before)


def waits_for_others(group):
    return lambda: group._engine.is_half_way


@pytest.mark.parametrize("engine", ["kernel", "wide", "pure"])
@run_ranks(2)
def test_a_signal_is_heard_in_a_sum_to_which_others_have_not_come(engine):
    group, store = group_with(engine), session().store
    for number in range(2):
        tensor = torch.arange(600_011.0) * (1 + hora.rank())
        if hora.rank() == 0:
            with signalled(waits_for_others(group), lambda number=number: store.set(f"heard {engine} {number}", "")):
                dist.all_reduce(tensor, group=group)
        else:
            store.wait([f"heard {engine} {number}"], timedelta(seconds=10.0))
            dist.all_reduce(tensor, group=group)
        assert tensor.equal(torch.arange(600_011.0) * 3)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("engine", ["kernel", "wide", "pure"])
@run_ranks(2)
def test_a_sum_that_a_signal_breaks_off_is_the_last_of_its_group_everywhere(engine):
    def ring():
        raise KeyboardInterrupt

    group, tensor = group_with(engine), torch.ones(600_011)
    if hora.rank() == 0:
        with signalled(waits_for_others(group), ring), pytest.raises(KeyboardInterrupt):
            dist.all_reduce(tensor, group=group)
        with pytest.raises(RuntimeError, match="of no use any more since a call has failed: KeyboardInterrupt"):
            dist.all_reduce(tensor, group=group)
    hora.barrier()
    if hora.rank() == 1:
        with pytest.raises(RuntimeError, match="rank 0 has left the group"):
            dist.all_reduce(tensor, group=group)
    hora.barrier()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("engine", ["kernel", "pure"])
@run_ranks(2)
def test_a_call_of_a_handler_inside_another_is_refused_and_that_goes_on(engine):
    group, store, tensor, refused = group_with(engine), session().store, torch.ones(600_011), []

    def ring():
        with pytest.raises(RuntimeError, match="a handler of a signal must make no collectives") as caught:
            dist.all_reduce(torch.ones(2), group=group)
        refused.append(caught.value)
        store.set(f"refused {engine} {len(refused)}", "")

    if hora.rank() == 0:
        with signalled(waits_for_others(group), ring):
            dist.all_reduce(tensor, group=group)
    else:
        store.wait([f"refused {engine} 1"], timedelta(seconds=10.0))
        dist.all_reduce(tensor, group=group)
    assert tensor.eq(2).all()
    said = [torch.zeros(2), torch.zeros(2)]
    if hora.rank() == 1:
        store.wait([f"refused {engine} 2"], timedelta(seconds=10.0))
    posted = group.post_all_gather(said, torch.full((2,), 1.0 + hora.rank()))
    if hora.rank() == 0:
        with signalled(lambda: group._carrier is not None, ring):
            posted.wait()
    else:
        posted.wait()
    assert [values.tolist() for values in said] == [[1.0, 1.0], [2.0, 2.0]]
    assert len(refused) == (2 if hora.rank() == 0 else 0)
    hora.barrier()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("engine", ["kernel", "pure"])
@run_ranks(2)
def test_no_thread_for_messages_outlives_the_group(engine):
    group = group_with(engine)
    if hora.rank() == 1:
        work = dist.irecv(received := torch.zeros(2), src=0, group=group)
    hora.barrier()
    if hora.rank() == 0:
        dist.send(torch.ones(2), dst=1, group=group)
    else:
        work.wait()
        assert received.eq(1).all()
    thread = group._mailroom._thread
    assert hora.rank() == 0 or thread.is_alive()
    dist.destroy_process_group(group)
    assert thread is None or not thread.is_alive()
    hora.barrier()


@run_ranks(2, backend="shm")
def test_a_signal_is_heard_by_who_waits_for_ranks_that_have_not_come():
    def ring(*_):
        raise KeyboardInterrupt

    if hora.rank() == 0:
        before = signal.signal(signal.SIGALRM, ring)
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            hora.barrier()
        assert time.monotonic() - began < 1.0
        signal.signal(signal.SIGALRM, before)
        dist.all_reduce(torch.zeros(1, dtype=torch.int32))  # what is left of the barrier
    else:
        time.sleep(1.5)
        hora.barrier()
    hora.barrier()


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 4))


def trained(module: nn.Module, parameters: list[nn.Parameter], batches: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        optimizer.step()


HOOKS = {
    "fp16": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "powersgd": lambda ddp: ddp.register_comm_hook(
        powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
    ),
}


@pytest.mark.parametrize("engine", ["kernel", "pure"])
@pytest.mark.parametrize(
    ("options", "hook", "tolerance"),
    [
        ({}, None, 1e-6),
        ({"gradient_as_bucket_view": True, "static_graph": True}, None, 1e-6),
        ({"find_unused_parameters": True, "bucket_cap_mb": 0.01}, None, 1e-6),
        ({}, "fp16", 1e-3),
        ({"bucket_cap_mb": 100}, "powersgd", 3e-2),
    ],
)
@run_ranks(2, 3)
def test_distributed_data_parallel_works_on_it_unmodified(engine, options, hook, tolerance, world_size):
    group, rank = group_with(engine), hora.rank()
    torch.manual_seed(1)
    batches = torch.randn(5, 4 * world_size, 8)
    model, alone = perceptron(), perceptron()
    ddp = DistributedDataParallel(model, process_group=group, **options)
    if hook is not None:
        HOOKS[hook](ddp)
    trained(ddp, list(model.parameters()), [batch[4 * rank : 4 * rank + 4] for batch in batches])
    trained(alone, list(alone.parameters()), list(batches))
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
    del ddp
    dist.destroy_process_group(group)


@run_ranks(2)
def test_fsdp_and_functional_collectives_work_on_it():
    assert hora.session().backend == "shm"
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    batches = torch.randn(3, 8, 8)
    model, alone = perceptron(), perceptron()
    fully_shard(model, mesh=mesh)
    trained(model, list(model.parameters()), [batch[4 * hora.rank() : 4 * hora.rank() + 4] for batch in batches])
    trained(alone, list(alone.parameters()), list(batches))
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, atol=1e-6, rtol=0)
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": hora.rank()})
    assert objects == [{"rank": 0}, {"rank": 1}]


def train(model: nn.Module, strategy: str, steps: int) -> None:
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, strategy=strategy, bucket_cap_bytes=2**10)
    for _ in range(steps):
        for inputs in optimizer.micro_batches([torch.ones(2, 8) * (1 + hora.rank())]):
            optimizer.backward(model(inputs).sum(), weight=2)
        optimizer.step()


def handed_to_threads(act) -> int:
    """How many sums of `act` the group has not carried out where they were waited for."""
    carry_out, handed = dist.group.WORLD.carry_out, []

    def watched(*words):
        work = carry_out(*words)
        handed.append(isinstance(work, QueuedWork))
        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.group.WORLD, "carry_out", watched, raising=False)
        act()
    assert handed
    return sum(handed)


@pytest.mark.parametrize("strategy", ["overlap", "deferred", "sharded"])
@run_ranks(2, 3, backend="shm")
def test_the_last_bucket_of_a_step_wakes_no_thread(strategy):
    one, several = nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4))
    gathered = 3 if strategy == "sharded" else 0
    assert handed_to_threads(lambda: train(one, strategy, 3)) == gathered
    assert handed_to_threads(lambda: train(several, strategy, 3)) > 2 * gathered
