"""How a test body travels to a rank: as the file of its module, its qualified name and JSON arguments. Nothing is pickled.

Modules are loaded in the ranks with pytest's own rewriting of assert statements, so that a failed assert shows the values it compared.
"""

import ast
import hashlib
import inspect
import json
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

try:
    from _pytest.assertion.rewrite import rewrite_asserts
except ImportError:  # a pytest that keeps it elsewhere: asserts then show no values

    def rewrite_asserts(mod: ast.Module, source: bytes, module_path: str | None = None) -> None:  # type: ignore[misc]  # noqa: D103
        pass


BODY = "hora_body"
"""Attribute of a decorated test that holds the function to run on the ranks."""

_PATH = "$path"


def describe(body: Callable[..., Any]) -> dict[str, str]:
    """Where a rank finds `body`.

    Raises:
        ValueError: it is defined inside another function, where no name leads to it.
    """
    body = inspect.unwrap(body)
    if "<locals>" in body.__qualname__:
        raise ValueError(f"{body.__qualname__} must be defined at the top of its module: ranks find it by name")
    return {"file": inspect.getfile(body), "module": body.__module__, "name": body.__qualname__}


def find(description: Mapping[str, str]) -> Callable[..., Any]:
    """The function that `describe` described, in this process."""
    module = _load(Path(description["file"]), description["module"])
    found: Any = module
    for part in description["name"].split("."):
        found = getattr(found, part)
    body: Callable[..., Any] = getattr(found, BODY, found)
    return body


def encode_arguments(arguments: Mapping[str, Any]) -> str:
    """Arguments as JSON. Numbers, strings, None, lists, dicts and paths travel; tuples arrive as lists.

    Raises:
        TypeError: a value cannot travel; the message names it.
    """
    for name, value in arguments.items():
        try:
            json.dumps(value, default=_encode_path)
        except TypeError as error:
            raise TypeError(f"argument {name} = {value!r} of a test on ranks must be JSON or a path: {error}") from error
    return json.dumps(dict(arguments), default=_encode_path)


def decode_arguments(text: str) -> dict[str, Any]:
    """What `encode_arguments` was given."""
    arguments: dict[str, Any] = json.loads(text, object_hook=_decode_path)
    return arguments


def _encode_path(value: Any) -> Any:
    if isinstance(value, Path):
        return {_PATH: str(value)}
    raise TypeError(f"{type(value).__name__} cannot travel")


def _decode_path(fields: dict[str, Any]) -> Any:
    return Path(fields[_PATH]) if set(fields) == {_PATH} else fields


def _load(path: Path, name: str) -> types.ModuleType:
    """The module in the file `path`; loaded once, under a name that no other test module has."""
    key = f"{name}@{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if key not in sys.modules:
        source = path.read_bytes()
        tree = ast.parse(source, str(path))
        rewrite_asserts(tree, source, str(path))
        module = types.ModuleType(key)
        module.__file__ = str(path)
        sys.modules[key] = module
        exec(compile(tree, str(path), "exec", dont_inherit=True), module.__dict__)
    return sys.modules[key]
