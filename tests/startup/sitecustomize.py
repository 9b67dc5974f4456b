"""Runs where tests start Python: such a process spends less on importing torch, which costs a rank more than anything else that it does.

It looks for garbage neither while it imports torch nor, ever after, among what that has made: a third of what it costs to start a rank and to
end it is that search, among objects of torch that are none. All that is made later is collected, at the end of the process too, but more
rarely than Python does by itself.

And it executes `torch._dynamo` only when something is asked of it. Every optimizer imports it, merely to say that functions of its own are not
to be compiled, and that costs as much as the rest of torch. Ranks that `hora.testing` forks have it from the beginning, so both are tested.

`tests/conftest.py` puts this directory on PYTHONPATH.
"""

import functools
import gc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Finder:
    """Finds one module as the other finders do, and has its loader execute it by `execute(module, original)`."""

    def __init__(self, name: str, execute: Callable[[ModuleType, Callable[[ModuleType], None]], None]) -> None:
        self._name = name
        self._execute = execute

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        original = spec.loader.exec_module
        spec.loader.exec_module = lambda module: self._execute(module, original)
        return spec


def _uncollected(module: ModuleType, original: Callable[[ModuleType], None]) -> None:
    gc.disable()
    try:
        original(module)
    finally:
        gc.freeze()
        gc.enable()


class _Late(ModuleType):
    """A module that is executed when something is asked of it that it has not yet; a plain one from then on."""

    def __getattr__(self, name: str) -> Any:
        if execute := self.__dict__.pop("execute", None):
            execute()
            self.__class__ = ModuleType
        if name in self.__dict__:
            return self.__dict__[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def _late_dynamo(module: ModuleType, original: Callable[[ModuleType], None]) -> None:
    path = module.__dict__.pop("__path__")  # which is asked for when a module in it is imported

    def execute() -> None:
        module.__path__ = path
        original(module)

    def disable(function: Callable[..., Any] | None = None, *words: Any, **options: Any) -> Any:
        if function is None:
            del module.disable
            return module.disable(function, *words, **options)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if type(module) is ModuleType and not disabled:
                disabled.append(module.disable(function, *words, **options))
            return (*disabled, function)[0](*args, **kwargs)

        disabled: list[Callable[..., Any]] = []
        return call

    module.__dict__.update(execute=execute, disable=disable, graph_break=lambda *_, **__: None)
    module.__class__ = _Late


gc.set_threshold(20_000, 20, 50)
sys.meta_path.insert(0, _Finder("torch", _uncollected))
if "hora.testing.zygote" not in sys.orig_argv:
    sys.meta_path.insert(0, _Finder("torch._dynamo", _late_dynamo))
