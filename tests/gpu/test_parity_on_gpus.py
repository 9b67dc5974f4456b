"""The parity tests again, on CUDA tensors and NCCL, on as many of 1, 2, 3 and 4 GPUs as there are."""

import types
from collections.abc import Callable, Sequence

import pytest
import test_batch_statistics
import test_checks
import test_gradients
import test_optimizer_contract
import test_same_call
import torch

from hora.testing import run_ranks

WORLD_SIZES = [n for n in (1, 2, 3, 4) if n <= torch.cuda.device_count()] or [1]


def asked_for(test: Callable[..., None]) -> Sequence[int]:
    """The world sizes that a test runs with on CPUs."""
    return next(mark.args[1] for mark in test.pytestmark if mark.args and mark.args[0] == "world_size")


def on_gpus(test: Callable[..., None]) -> Callable[..., None]:
    """The same body on NCCL, with the world sizes that make sense here and were asked for there."""
    marks = [mark for mark in test.pytestmark if mark.args and mark.args[0] != "world_size"]
    again = run_ranks(*(n for n in WORLD_SIZES if n in asked_for(test)), backend="nccl", timeout_s=120)(test.hora_body)
    for mark in marks:
        again = getattr(pytest.mark, mark.name)(*mark.args, **mark.kwargs)(again)
    return again


def collect(module: types.ModuleType) -> dict[str, Callable[..., None]]:
    tests = {name: value for name, value in vars(module).items() if name.startswith("test_") and value.__module__ == module.__name__}
    return {
        name: on_gpus(test) for name, test in tests.items() if hasattr(test, "hora_body") and any(n in WORLD_SIZES for n in asked_for(test))
    }


for source in (test_gradients, test_optimizer_contract, test_batch_statistics, test_same_call, test_checks):
    globals().update(collect(source))
