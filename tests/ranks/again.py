"""Tests of `@run_ranks` once more, on another backend."""

import types
from collections.abc import Callable, Sequence

import pytest

from hora.testing import run_ranks

Test = Callable[..., None]


def collect(module: types.ModuleType, backend: str, world_sizes: Sequence[int], timeout_s: float = 60.0) -> dict[str, Test]:
    """The tests of `module` that run on ranks, on `backend` and those of `world_sizes` that they were written for."""
    tests = {name: value for name, value in vars(module).items() if name.startswith("test_") and value.__module__ == module.__name__}
    on_ranks = {name: test for name, test in tests.items() if hasattr(test, "hora_body")}
    sizes = {name: [n for n in world_sizes if n in _asked_for(test)] for name, test in on_ranks.items()}
    return {name: _again(test, backend, sizes[name], timeout_s) for name, test in on_ranks.items() if sizes[name]}


def _asked_for(test: Test) -> Sequence[int]:
    return next(mark.args[1] for mark in test.pytestmark if mark.args and mark.args[0] == "world_size")


def _again(test: Test, backend: str, world_sizes: Sequence[int], timeout_s: float) -> Test:
    again = run_ranks(*world_sizes, backend=backend, timeout_s=timeout_s)(test.hora_body)
    there = {mark.args[0] for mark in again.pytestmark if mark.args}
    for mark in test.pytestmark:
        if mark.args and mark.args[0] not in there:
            again = getattr(pytest.mark, mark.name)(*mark.args, **mark.kwargs)(again)
    return again
