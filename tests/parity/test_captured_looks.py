"""What a captured step finds of this rank's gradients: the same whether one kernel copies and looks at them or torch does one after the other.

What is captured on a GPU is carried out on a CPU here, with the kernel's work done by torch; it is tried on GPUs (`tests/gpu`).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from test_captured_update import Weight
from test_packing import in_torch
from torch import nn

import hora
from hora.comm.packing import Packing, packing
from hora.sync import captured, gradients
from hora.testing import run_ranks

SHAPES = [(8,), (1,), (7,), (4, 4)]
"""The last is the first in its bucket, and where that of the second begins the kernel reads and writes nothing."""


@contextmanager
def on_cpus(*, packs: bool) -> Iterator[mock.Mock]:
    with ExitStack() as stack:
        for place, name, value in (
            (torch.cuda, "Stream", lambda _: None),  # all runs in order
            (torch.cuda, "Event", mock.Mock()),
            (torch.Tensor, "pin_memory", lambda tensor: tensor),
            (captured, "FLAG_ALGORITHM", "native"),
            (gradients, "make_packing", Packing if packs else mock.Mock(return_value=None)),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        yield stack.enter_context(mock.patch.object(packing, "_launch", side_effect=in_torch))


def spoil(parameter: nn.Parameter, value: float):
    """In the next backward the last element of the gradient of `parameter` is `value`."""

    def hook(gradient):
        handle.remove()
        return torch.cat([gradient.flatten()[:-1], gradient.new_tensor([value])]).view(gradient.shape)

    handle = parameter.register_hook(hook)


@run_ranks(1, 2)
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(
    "settings", [{"strategy": "overlap"}, {"strategy": "deferred", "bucket_cap_bytes": 32}, {"strategy": "sharded"}], ids=str
)
def test_what_is_not_finite_is_found_in_its_micro_step(world_size, settings, packs):
    model = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in SHAPES])
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, **settings)
    mine = hora.rank() == world_size - 1
    with on_cpus(packs=packs) as launched:
        checks = optimizer.synchronizer.captured_checks()
        checks.prepare(2)
        for micro_step, spoilt in [(0, []), (0, [3]), (1, [0]), (1, [1]), (0, [1]), (1, [0, 1, 2, 3]), (0, [])]:
            with optimizer.synchronizer.standing_in(Weight(1.0), checks):
                for number, _ in enumerate(optimizer.micro_batches([None, None])):
                    for index in spoilt if number == micro_step and mine else []:
                        spoil(model[index], torch.nan if index % 2 else -torch.inf)
                    optimizer.backward(sum((parameter * parameter).sum() for parameter in model), weight=1)
                for bucket in optimizer.synchronizer.arrivals().undivided():
                    bucket.unpack()
            assert float(checks.flag) == bool(spoilt)
            names = [str(index) for index in spoilt] if mine else []
            found = {"micro_step": micro_step, "names": names, "loss_is_finite": True, "explicit": True} if names else {"micro_step": None}
            assert checks._report() == found
            checks._count.zero_()
    assert launched.called is packs
