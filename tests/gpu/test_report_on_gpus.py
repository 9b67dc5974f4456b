"""`hora.report()` on GPUs: times are those of the device, and recording keeps a step neither from being captured nor from its bits."""

import time

import pytest
import torch
import torch.nn.functional as F
from gpu_ranks import UNSHARED, WORLD_SIZES
from test_train_step_on_gpus import train
from torch import nn

import hora
from hora import events
from hora.diag.report.recorder import DeviceRecorder
from hora.testing import run_ranks

STEPS = 12
ROWS, WIDTH = 4096, 4096


class Busy(nn.Module):
    """Keeps the GPU for some milliseconds a product, and the host for as long as it sleeps."""

    def __init__(self, products: int = 1, sleep_s: float = 0.0):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.products, self.sleep_s = products, sleep_s

    def forward(self, inputs):
        time.sleep(self.sleep_s)
        for _ in range(self.products):
            inputs = self.layer(inputs).tanh()
        return inputs


def report_of(model: nn.Module, *, data_s: float = 0.0):
    model = model.cuda()
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-3), model)
    inputs = torch.randn(ROWS, WIDTH, device="cuda")

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return STEPS * hora.world_size()

        def __getitem__(self, index):
            time.sleep(data_s)
            return index

    torch.cuda.synchronize()
    with events.observe(DeviceRecorder(warm_up=3)):
        for step in hora.DataLoader(Samples(), global_batch_size=hora.world_size()):
            for _ in optimizer.micro_batches(step):
                optimizer.backward(F.mse_loss(model(inputs), inputs, reduction="sum"), weight=ROWS)
            optimizer.step()
        return hora.report()


@run_ranks(*UNSHARED, backend="nccl")
def test_a_device_that_is_busy_is_told_from_one_that_waits_for_its_host(world_size):
    busy, starved = report_of(Busy(products=20)), report_of(Busy(sleep_s=0.2))
    for report in (busy, starved):
        assert (report.device, report.replayed, report.steps) == ("cuda", 0.0, STEPS - 3)
        shares = [getattr(report.times, name).share for name in ("outside", "data", "compute", "agreement", "communication", "update")]
        assert sum(shares) == pytest.approx(1.0, abs=1e-3)
    assert busy.host_bound < 0.5
    assert busy.host.median_s < 0.5 * busy.times.step.median_s
    assert starved.host_bound > 0.5
    assert starved.times.step.median_s > 0.2


@run_ranks(*UNSHARED[:2], backend="nccl")
def test_a_wait_for_the_loader_counts_as_far_as_the_device_waits(world_size):
    slow = report_of(Busy(), data_s=0.1)
    assert slow.times.data.share > 0.5
    assert slow.advice.startswith("data wait is")
    hidden = report_of(Busy(products=60), data_s=0.01)
    assert hidden.times.data.share < 0.1, "the device was still busy"


@run_ranks(*WORLD_SIZES[:2], backend="nccl")
def test_steps_are_captured_while_they_are_recorded_and_have_the_same_bits(world_size):
    _, numbers, state = train("auto", STEPS)
    with events.observe(DeviceRecorder(warm_up=5)):
        captured, again, same = train("auto", STEPS)
        report = hora.report()
    assert (captured.num_replayed, captured.eager_because) == (STEPS - 3, None)
    assert report.replayed == 1.0
    assert report.host.median_s > 0
    assert report.times.compute.median_s > 0
    assert numbers == again
    assert all(torch.equal(*pair) for pair in zip(state, same, strict=True))
