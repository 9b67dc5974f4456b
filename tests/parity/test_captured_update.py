"""The update of a captured step, bucket by bucket and with the division left to the optimizer, has the bits of one that waits for all sums, as it
is made where somebody listens to the optimizer's steps.

What is captured on a GPU is carried out on a CPU here, where torch has fused optimizers too.
"""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hora
from hora.comm.flat import all_reduce_flat
from hora.comm.groups import Groups
from hora.comm.peer_memory import Divisor
from hora.sync import gradients, sums
from hora.sync.captured import CapturedChecks
from hora.testing import run_ranks

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, fused=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0.1, fused=True),
}


class Unlooked(CapturedChecks):
    """Finds nothing, on no device."""

    are_on = False

    def __init__(self, flag: float) -> None:
        self._found = torch.tensor(flag)

    def begin(self) -> None:
        pass

    def note(self, losses, *, last):
        pass

    def look_early(self, bucket) -> None:
        pass

    def keep_own(self) -> None:
        pass

    def look(self, step, bad_weight=False, loss_scale=None):
        return None

    @property
    def flag(self) -> Tensor:
        return self._found

    def join(self) -> None:
        pass


class Weight:
    """Of the global batch, known from the beginning."""

    def __init__(self, weight: float) -> None:
        self._weight = torch.tensor(weight, dtype=torch.float64)

    def total_weight(self) -> tuple[Tensor, Tensor]:
        return self._weight, torch.tensor(False)

    def soon(self) -> Divisor:
        return Divisor(self._weight, None)


class PulledOnCPUs:
    """Sums tensors as a backend does, where copy engines would, and divides them at once."""

    def __init__(self, buckets) -> None:
        self.tensors = [torch.zeros_like(bucket.buffer) for bucket in buckets]
        self.size_bytes = sum(tensor.nbytes for tensor in self.tensors)
        self.num_divided = 0

    def pull_sum(self, _, index: int, divisor: Divisor | None):
        work = all_reduce_flat(self.tensors[index])
        if divisor is not None:
            work.wait()
            self.tensors[index].div_(divisor.value)
            self.num_divided += 1
        return work


def train(optimizer: str, *, at_once: bool, spoilt: int | None = None, num_steps: int = 6, pulls: bool = False, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    distributed = hora.DistributedOptimizer(OPTIMIZERS[optimizer](model.parameters()), model, **settings)
    counted: list[int] = []
    if pulls:
        native = distributed.synchronizer._native_sums
        native.pull(pulled := PulledOnCPUs(native._buckets))
        native.in_threads = False  # the last sum is begun like the others
    if at_once:
        distributed.register_step_pre_hook(lambda *_: counted.append(1))
    generator = torch.Generator().manual_seed(1 + hora.rank())
    weight = 12.0 * hora.world_size()
    for step in range(num_steps):
        batches = [(torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)) for _ in range(2)]

        def window(batches=batches) -> None:
            with mock.patch.object(sums, "pull_sum", pulled.pull_sum) if pulls else nullcontext():
                for inputs, targets in distributed.micro_batches(batches):
                    distributed.backward(F.cross_entropy(model(inputs), targets, reduction="sum"), weight=6)

        if step > 0:
            checks = Unlooked(float(step == spoilt))
            with distributed.synchronizer.standing_in(Weight(weight), checks):
                window()
                distributed.update_captured(checks)
            assert not pulls or pulled.num_divided == step * len(pulled.tensors) > 0
        else:
            window()
            distributed.step()
    state = [value for values in distributed.state_dict()["state"].values() for value in values.values()]
    return [*(parameter.detach() for parameter in model.parameters()), *state], counted


@run_ranks(1, 2, 3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["overlap", "deferred", "sharded"])
def test_updates_while_sums_arrive_have_the_bits_of_those_after(world_size, optimizer, strategy):
    for options in ({"bucket_cap_bytes": 64}, {}, {"bucket_cap_bytes": 64, "clip_norm": 0.5}):
        (expected, counted), (found, _) = (train(optimizer, at_once=at_once, strategy=strategy, **options) for at_once in (True, False))
        assert len(counted) == 6, "who listens hears of one step an update"
        assert len(found) == len(expected)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), options


@run_ranks(1, 2, 3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options", [{"bucket_cap_bytes": 64}, {}, {"bucket_cap_bytes": 64, "clip_norm": 0.5}])
def test_sums_that_are_divided_on_their_way_are_not_divided_again(world_size, optimizer, options):
    (expected, _), (found, _) = (train(optimizer, at_once=False, pulls=pulls, num_steps=5, **options) for pulls in (False, True))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), options


@run_ranks(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_bucket_is_updated_where_the_flag_is_up(world_size, optimizer):
    (expected, _), (found, _) = (train(optimizer, at_once=at_once, bucket_cap_bytes=64, spoilt=5) for at_once in (True, False))
    (before, _) = train(optimizer, at_once=False, bucket_cap_bytes=64, num_steps=5)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert all(torch.equal(*pair) for pair in zip(found, before, strict=True))


@run_ranks(1)
def test_a_window_that_is_captured_reads_nothing_of_those_before():
    model = nn.Linear(2, 2)
    synchronizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model).synchronizer
    synchronizer.local_weight = before = torch.tensor(5.0)
    with synchronizer.standing_in(Weight(1.0), Unlooked(0.0)):
        assert synchronizer.local_weight == 0.0  # a tensor of theirs would be read in each replay, when its memory is given back
    assert synchronizer.local_weight is before


@run_ranks(1)
def test_a_window_that_cannot_begin_leaves_everything_as_it_was():
    model = nn.Linear(2, 2)
    synchronizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model).synchronizer
    before = synchronizer._control, synchronizer.finite
    checks = Unlooked(0.0)
    checks.are_on = True
    full = mock.patch.object(gradients, "make_packing", side_effect=torch.OutOfMemoryError("no room"))
    with full, pytest.raises(torch.OutOfMemoryError), synchronizer.standing_in(Weight(1.0), checks):
        pytest.fail("it must not begin")
    assert (synchronizer._control, synchronizer.finite) == before


@run_ranks(2)
def test_buckets_move_where_gpus_share_memory_at_the_first_call_or_never():
    """Graphs that have been captured since would go on with memory that is given to others."""
    for dtype, least, shared in (
        (torch.float32, 0, True),
        (torch.float32, 0, False),
        (torch.float32, 2**20, True),
        (torch.float16, 0, True),
    ):
        model = nn.Linear(4, 3).to(dtype)
        gradients = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model).synchronizer
        native, before = gradients._native_sums, [bucket.buffer.data_ptr() for bucket in gradients._buckets]
        pulled = PulledOnCPUs(native._buckets)
        with mock.patch.object(sums, "_LEAST_PULLED_BYTES", least), mock.patch.object(Groups, "pulling") as ask:
            ask.return_value = pulled if shared else None
            gradients.pull_sums()
            ask.return_value = PulledOnCPUs(native._buckets)  # there would be memory now
            gradients.pull_sums()
        large = least == 0 and dtype is torch.float32
        assert ask.call_count == large
        moved = large and shared
        assert [bucket.buffer.data_ptr() for bucket in native._buckets] == ([t.data_ptr() for t in pulled.tensors] if moved else before)
        assert (native.pulls, gradients.shared_bytes) == (moved, pulled.size_bytes if moved else 0)


@run_ranks(2)
def test_the_backend_sums_buckets_again_where_they_lie_once_they_are_pulled_no_more():
    model = nn.Linear(4, 3)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    native = optimizer.synchronizer._native_sums
    native.pull(pulled := PulledOnCPUs(native._buckets))
    optimizer.synchronizer.stop_pulling()
    for _ in optimizer.micro_batches([None]):
        optimizer.backward(sum(parameter.sum() for parameter in model.parameters()) * (1 + hora.rank()), weight=1)
    assert all(torch.equal(parameter.grad, torch.full_like(parameter, 1.5)) for parameter in model.parameters())
    assert model.weight.grad.untyped_storage().data_ptr() in [tensor.untyped_storage().data_ptr() for tensor in pulled.tensors]
    assert (native.pulls, native.shared_bytes) == (False, pulled.size_bytes)
