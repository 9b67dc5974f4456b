"""Dataclasses by name: which class a name means in this process, and how an object of it is made without running any of its code.

A name comes from a message or a file, so it can only choose among the dataclasses that are loaded here already: nothing is imported for it, not
even by a module's own `__getattr__`. An object is made from its fields as they were, without `__init__` and `__post_init__`: those have run
where it was made first, may compute or check with what is not there yet, and would give whoever wrote the message code to call.
"""

import dataclasses
import sys
from collections.abc import Mapping
from types import MemberDescriptorType
from typing import Any

from hora.errors import ConfigError


def name_of(obj: Any) -> str:
    """By what name the class of a dataclass object can be found again: `package.module:Outer.Inner`.

    Raises:
        ConfigError: it cannot be found, or its objects are more than their fields.
    """
    kind = type(obj)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _look_up(name) is not kind:
        raise ConfigError("must be a dataclass that stands at the top of a module or in such a class, where it can be found by name")
    _bare(kind)
    return name


def fields_of(obj: Any) -> dict[str, Any]:
    """The fields of a dataclass object and what they hold.

    Raises:
        ConfigError: a field holds nothing.
    """
    names = [field.name for field in dataclasses.fields(obj)]
    unset = [name for name in names if not hasattr(obj, name)]
    if unset:
        raise ConfigError(f"must have a value in each field, but has none in {', '.join(unset)}")
    return {name: getattr(obj, name) for name in names}


def rebuild(name: str, values: Mapping[str, Any]) -> Any:
    """An object of the dataclass called `name` with these fields.

    Raises:
        ConfigError: no such class is loaded in this process, or it has other fields here.
    """
    kind = _look_up(name)
    if not isinstance(kind, type) or "__dataclass_fields__" not in vars(kind):
        raise ConfigError(
            f"the dataclass {name!r} must be loaded in this process to be received, but is not: import its module before, on all ranks"
        )
    names = [field.name for field in dataclasses.fields(kind)]
    if set(names) != set(values):
        raise ConfigError(
            f"the dataclass {name!r} must have the fields {', '.join(values) or 'none'}, but here has {', '.join(names) or 'none'}"
        )
    obj = _bare(kind)
    for field in names:
        object.__setattr__(obj, field, values[field])
    return obj


def _look_up(name: str) -> object:
    """What is called `name` in the modules that are loaded; None if nothing is."""
    module, _, path = name.partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        # Not getattr: a module or a class may answer it with code, even with an import.
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _bare(kind: type) -> Any:
    """An object of `kind` without fields."""
    computed = [field.name for field in dataclasses.fields(kind) if _runs_code(kind, field.name)]
    if computed:
        raise ConfigError(f"must be a dataclass whose fields are plain values, but setting {', '.join(computed)} runs code")
    try:
        return object.__new__(kind)
    except TypeError as error:
        raise ConfigError("must be a dataclass that is made of its fields alone, but has another built-in type as its base") from error


def _runs_code(kind: type, field: str) -> bool:
    found = next((vars(base)[field] for base in kind.__mro__ if field in vars(base)), None)
    return hasattr(type(found), "__set__") and not isinstance(found, MemberDescriptorType)
