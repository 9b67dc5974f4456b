"""Which functions ranks can find by name."""

import functools
import runpy
import sys

import called
import pytest

from hora.calls import functions
from hora.errors import ConfigError


@pytest.mark.parametrize("function", [called.everything, called.Holder.inside, functools.wraps])
def test_a_function_is_found_by_its_name(function):
    assert functions.find(functions.describe(function)) is function


def outer():
    def inner():
        pass

    return inner


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda: 1, "a lambda has none"),
        (outer(), "outer.<locals>.inner stands inside another function"),
        (called.original, "another object than the function that was given as called.replaced"),
        (functools.partial(outer), "is a partial"),
        (called.Holder().method, "is a method"),
        (print, "is a builtin_function_or_method"),
        (called.Holder, "is a type"),
    ],
)
def test_what_ranks_could_not_find_is_refused_with_the_reason(function, reason):
    with pytest.raises(ConfigError) as caught:
        functions.describe(function)
    assert reason in str(caught.value)
    assert "write it at the top of a module" in str(caught.value)


def test_functions_of_a_notebook_are_refused(monkeypatch):
    def function():
        pass

    function.__module__, function.__qualname__ = "__main__", "function"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(ConfigError, match="function was written in a notebook or at Python's prompt"):
        functions.describe(function)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/work/train.py", raising=False)
    with pytest.raises(ConfigError, match=r"function was written in the script /work/train\.py itself"):
        functions.describe(function)


def test_functions_of_a_program_that_is_a_module_are_found(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text("from hora.calls import functions\ndef work():\n    pass\nsaid = functions.describe(work)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert runpy.run_module("program", run_name="__main__", alter_sys=True)["said"] == {"module": "program", "name": "work"}


def test_a_function_that_is_gone_is_named():
    with pytest.raises(ConfigError, match=r"called\.absent must be a function on the ranks too"):
        functions.find({"module": "called", "name": "absent"})
