"""Reads the few kinds of pickle that CIFAR's files for Python are: dicts, lists, numbers, texts and NumPy arrays of bytes.

Nothing is imported or called: opcodes are named by the standard library's disassembler and carried out here, those that build data and no others,
and what they would call is known by name. Not a general reader.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from hora.errors import ConfigError

_MARK: Final = object()
_RECONSTRUCT: Final = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_KNOWN: Final = (*_RECONSTRUCT, "numpy ndarray", "numpy dtype")
_CONSTANTS: Final[dict[str, Any]] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES: Final = {"BININT", "BININT1", "BININT2", "INT", "SHORT_BINSTRING", "BINSTRING", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"}


class _NotAllowed(Exception):
    """The file would do something else than hold data."""


@dataclass(frozen=True)
class _Name:
    """Something that the file would import, by its name alone."""

    text: str


@dataclass
class _Built:
    """What the file would call, and what it gives it."""

    of: str
    given: Any
    state: Any = None


@dataclass
class _Machine:
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def since_mark(self) -> list[Any]:
        """Takes all above the last mark."""
        at = len(self.stack) - 1 - [each is _MARK for each in reversed(self.stack)].index(True)
        taken = self.stack[at + 1 :]
        del self.stack[at:]
        return taken

    def last(self, count: int) -> list[Any]:
        """Takes the last `count`."""
        if len(self.stack) < count:
            raise IndexError("too few values")
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def append(self, values: list[Any]) -> None:
        """To the list below."""
        if not isinstance(self.stack[-1], list):
            raise _NotAllowed("it appends to something that is no list")
        self.stack[-1].extend(values)

    def set_items(self, values: list[Any]) -> None:
        """Of the dict below."""
        if not isinstance(self.stack[-1], dict):
            raise _NotAllowed("it sets items of something that is no dict")
        if not all(isinstance(name, (str, bytes)) for name in values[::2]):  # the hash of nested tuples may never end, or end the process
            raise _NotAllowed("it has a key that is no text")
        self.stack[-1].update(zip(values[::2], values[1::2], strict=True))

    def import_name(self, name: str) -> None:
        """Remembers what would be imported."""
        if name not in _KNOWN:
            raise _NotAllowed(f"it would import {name.replace(' ', '.')}")
        self.stack.append(_Name(name))

    def call(self) -> None:
        """Remembers a call that makes an array or its type."""
        function, given = self.last(2)
        if not (isinstance(function, _Name) and function.text in (*_RECONSTRUCT, "numpy dtype")):
            raise _NotAllowed("it would call something else than what makes an array")
        self.stack.append(_Built("dtype" if function.text == "numpy dtype" else "array", given))

    def build(self) -> None:
        """Gives the thing below its state."""
        (state,) = self.last(1)
        if not isinstance(self.stack[-1], _Built):
            raise _NotAllowed("it would give a state to something that is no array")
        self.stack[-1].state = state


_ACTIONS: Final[dict[str, Callable[[_Machine, Any], None]]] = {
    "PROTO": lambda *_: None,
    "FRAME": lambda *_: None,
    "MARK": lambda machine, _: machine.stack.append(_MARK),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.stack.append(tuple(machine.last(1))),
    "TUPLE2": lambda machine, _: machine.stack.append(tuple(machine.last(2))),
    "TUPLE3": lambda machine, _: machine.stack.append(tuple(machine.last(3))),
    "APPEND": lambda machine, _: machine.append(machine.last(1)),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items(machine.last(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "BINPUT": lambda machine, arg: machine.memo.update({arg: machine.stack[-1]}),
    "LONG_BINPUT": lambda machine, arg: machine.memo.update({arg: machine.stack[-1]}),
    "BINGET": lambda machine, arg: machine.stack.append(machine.memo[arg]),
    "LONG_BINGET": lambda machine, arg: machine.stack.append(machine.memo[arg]),
    "GLOBAL": lambda machine, arg: machine.import_name(arg),
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.build(),
}


def read_pickled(content: bytes, path: Path) -> dict[str, Any]:
    """The dict in a pickle: numbers, texts (bytes of Python 2 as latin-1), lists, and arrays of bytes.

    Raises:
        ConfigError: it holds anything else, or is damaged; names the file and the byte.
    """
    machine, at = _Machine(), 0
    try:
        for opcode, arg, position in pickletools.genops(content):
            at = position or 0
            if opcode.name == "STOP":
                break
            _carry_out(machine, opcode.name, arg)
        (found,) = machine.last(1)
        if not isinstance(found, dict):
            raise _NotAllowed(f"it holds a {type(found).__name__} and no dict")
        return {_as_text(name): _as_value(value) for name, value in found.items()}
    except _NotAllowed as error:
        raise ConfigError(f"{path} must be one of CIFAR's files for Python, but at byte {at:,} {error}; nothing of it was run") from error
    except (ValueError, IndexError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged or no file of CIFAR's for Python: after byte {at:,}: {error}; fetch it anew") from error


def _carry_out(machine: _Machine, name: str, arg: Any) -> None:
    if name in _VALUES:
        machine.stack.append(arg)
    elif name in _CONSTANTS:
        machine.stack.append(_CONSTANTS[name])
    elif name in _ACTIONS:
        _ACTIONS[name](machine, arg)
    else:
        raise _NotAllowed(f"it has the opcode {name}, which they have not")


def _as_text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _as_value(value: Any) -> Any:
    if not isinstance(value, _Built):
        return value
    if value.of != "array":
        raise _NotAllowed("it holds a type in the place of data")
    _, shape, dtype, fortran, content = value.state
    if not (isinstance(dtype, _Built) and dtype.given[0] in ("u1", "|u1", b"u1")) or fortran:
        raise _NotAllowed("it holds an array of something else than bytes in rows")
    return np.frombuffer(content.encode("latin-1") if isinstance(content, str) else content, np.uint8).reshape(shape)
