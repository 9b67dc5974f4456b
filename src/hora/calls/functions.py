"""A function by name: how ranks find it, and which functions they cannot find. Nothing is pickled."""

import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from hora.errors import ConfigError

_REMEDY = "write it at the top of a module (a file such as work.py) and import it from there"


def describe(function: Callable[..., Any]) -> dict[str, str]:
    """The module and qualified name by which ranks import `function`.

    Raises:
        ConfigError: they could not; the message says why.
    """
    if not inspect.isfunction(function):
        raise ConfigError(f"ranks can run functions that stand in a module, but {function!r} is a {type(function).__name__}; {_REMEDY}")
    name, module = function.__qualname__, _module_of(function)
    if "<lambda>" in name:
        raise ConfigError(f"ranks find a function by its name, but a lambda has none; {_REMEDY}")
    if "<locals>" in name:
        raise ConfigError(f"ranks find a function by its name, but {name} stands inside another function, where no name leads; {_REMEDY}")
    if module == "__main__":
        raise ConfigError(
            f"ranks import the module of a function, but {name} was written in {_say_main()}, which is no module that they could import; {_REMEDY}"
        )
    found = _look_up(module, name)
    if found is not function:
        raise ConfigError(
            f"ranks would find another object than the function that was given as {module}.{name} (was it decorated or replaced?); {_REMEDY}"
        )
    return {"module": module, "name": name}


def find(description: Mapping[str, str]) -> Callable[..., Any]:
    """The function that `describe` described, in this process; imports its module.

    Raises:
        ConfigError: it is not there.
    """
    import_module(description["module"])
    found = _look_up(description["module"], description["name"])
    if not callable(found):
        raise ConfigError(f"{description['module']}.{description['name']} must be a function on the ranks too, but is {found!r}")
    function: Callable[..., Any] = found
    return function


def say(description: Mapping[str, str]) -> str:
    """The function's name for people."""
    return f"{description['module']}.{description['name']}"


def _module_of(function: Callable[..., Any]) -> str:
    """The name under which the module is imported; that of a program started with `python -m` is in its spec."""
    if function.__module__ != "__main__":
        return function.__module__
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return "__main__" if spec is None else str(spec.name)


def _look_up(module: str, name: str) -> object:
    found: object = sys.modules.get(module)
    if module == getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", None):
        found = sys.modules["__main__"]
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _say_main() -> str:
    path = getattr(sys.modules["__main__"], "__file__", None)
    return "a notebook or at Python's prompt" if path is None else f"the script {path} itself"
