"""What Hora takes for granted of PyTorch's fused optimizers on a GPU: a flag switches an update off, and a part of the parameters may come first."""

import pytest
import torch
from torch import nn

from hora.sync.fused import divides_the_same, is_same_in_parts, switched_off_if, switches_off_on_device

OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0.1, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, fused=True),
}
SHAPES = [(3,), (48,), (16,), (64,), (1000, 7)]


def train(optimizer: str, *, in_parts: bool, last_flag: float = 0.0):
    generator = torch.Generator("cuda").manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, device="cuda", generator=generator)) for shape in SHAPES]
    made = OPTIMIZERS[optimizer](parameters)
    divisor = torch.full((), 12.0, device="cuda")
    for step in range(8):
        gradients = [torch.randn(shape, device="cuda", generator=generator) for shape in SHAPES]
        flag = torch.full((), last_flag if step == 7 else 0.0, device="cuda")
        made.zero_grad()
        if in_parts and step > 0:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                folds = divides_the_same(made)
                parameter.grad = gradient if folds else gradient / divisor
                with switched_off_if(made, flag, divisor if folds else None):
                    made.step()
                parameter.grad = None
            continue
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient / divisor
        assert step == 0 or switches_off_on_device(made)
        if step == 0:
            made.step()
        else:
            with switched_off_if(made, flag):
                made.step()
    state = [value for values in made.state.values() for value in values.values()]
    return [tensor.detach().cpu() for tensor in [*parameters, *state]]


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("last_flag", [0.0, 1.0])
def test_parts_one_after_the_other_have_the_bits_of_all_at_once(optimizer, last_flag):
    assert is_same_in_parts(OPTIMIZERS[optimizer]([nn.Parameter(torch.zeros(1, device="cuda"))]))
    expected, found = (train(optimizer, in_parts=in_parts, last_flag=last_flag) for in_parts in (False, True))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_is_left_out_where_the_flag_is_up(optimizer):
    applied, left_out = (train(optimizer, in_parts=False, last_flag=last_flag) for last_flag in (0.0, 1.0))
    assert not any(torch.equal(*pair) for pair in zip(applied[: len(SHAPES)], left_out[: len(SHAPES)], strict=True))
