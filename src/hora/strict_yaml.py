"""YAML that means what it looks like: one document of plain data, each key and item with its place in the text.

Scalars are read as YAML 1.2 reads them, so that `1e-4` is a float and `no`, `on` and `12:30` are strings. Anchors, aliases, tags and
duplicate keys are refused, sizes are limited; every such problem is reported, not only the first. Relies on PyYAML's scanner and parser
and on none of its constructors, so that nothing in a file can name a Python object. `dump` writes text that `parse` reads back to the
same data.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the root of a document to one of its values."""

MAX_SIZE_BYTES: Final = 1 << 20
_MAX_DEPTH: Final = 32

_CONSTANTS: Final = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **{sign + text: float(f"{sign}inf") for sign in ("", "+", "-") for text in (".inf", ".Inf", ".INF")},
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}
_INTEGER: Final = re.compile(r"[-+]?(0|[1-9][0-9]{0,99})")
_PREFIXED: Final = re.compile(r"0x[0-9A-Fa-f]{1,64}|0o[0-7]{1,64}")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_LEADING_ZERO: Final = re.compile(r"[-+]?0[0-9]+")


@dataclass(frozen=True)
class Document:
    """What a text holds, where each part of it stands, and what is wrong with the text (each problem begins with its place)."""

    value: Any
    places: dict[KeyPath, str]
    problems: list[str]


def parse(text: str, locate: Callable[[int, int], str]) -> Document:
    """Reads one document; a wrong text gives problems, never an exception.

    Args:
        text: at most `MAX_SIZE_BYTES` long.
        locate: makes a place such as `config.yaml:3:5` from a line and a column, both counted from 1.
    """
    if len(text) > MAX_SIZE_BYTES:
        return Document(None, {}, [f"{locate(1, 1)}: a configuration must not exceed {MAX_SIZE_BYTES} bytes, but has {len(text)} instead"])
    reading = _Reading(locate)
    try:
        root = _Nodes(text, reading).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reading.problem(mark, f"this is no YAML: {error.problem or error.context}")
        return Document(None, {}, reading.problems)
    except yaml.YAMLError as error:
        return Document(None, {}, [f"{locate(1, 1)}: this is no YAML: {str(error).splitlines()[0]}"])
    value = None if root is None else reading.value(root, ())
    return Document(value, reading.places, reading.problems)


def scalar(text: str) -> Any:
    """The value of an unquoted word: null, a boolean, an integer, a float, or else the word itself."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _PREFIXED.fullmatch(text):
        return int(text, base=0)
    if _FLOAT.fullmatch(text) and not _LEADING_ZERO.fullmatch(text):
        return float(text)
    return text


def dump(value: Any) -> str:
    """Writes plain data (dict, list, str, int, float, bool, None) as YAML, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**16)


class _Nodes(Reader, Scanner, Parser, Composer, BaseResolver):
    """Turns text into nodes; refuses what could name Python objects, grow without bound, or mean more than it shows."""

    def __init__(self, text: str, reading: "_Reading") -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)
        self._reading = reading
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if self._depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"values nest deeper than {_MAX_DEPTH} levels", problem_mark=event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            self._reading.problem(event.start_mark, f"aliases are not allowed, but here is *{event.anchor}; write the value out")
            self.get_event()  # type: ignore[no-untyped-call]
            return yaml.ScalarNode("", "null")
        if event.anchor is not None:
            self._reading.problem(event.start_mark, f"anchors are not allowed, but here is &{event.anchor}; write the value out")
            event.anchor = None
        if event.tag is not None:
            self._reading.problem(event.start_mark, f"tags are not allowed, but here is {event.tag}; write the plain value")
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


@dataclass
class _Reading:
    """Collects places and problems while nodes become values."""

    locate: Callable[[int, int], str]
    places: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def place(self, mark: Any) -> str:
        return self.locate(1, 1) if mark is None else self.locate(mark.line + 1, mark.column + 1)

    def problem(self, mark: Any, text: str) -> None:
        self.problems.append(f"{self.place(mark)}: {text}")

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.places.setdefault(path, self.place(node.start_mark))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, item in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.problem(key.start_mark, "a key must be a plain name, but is a list or a mapping instead")
                continue
            here = (*path, key.value)
            if key.value in result:
                self.problem(key.start_mark, f"duplicate key `{show(here)}`; it stands at {self.places[here]} already")
                continue
            self.places[here] = self.place(key.start_mark)
            result[key.value] = self.value(item, here)
        return result

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text: str = node.value
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            self.problem(node.start_mark, "a string must be valid Unicode, but holds half of a surrogate pair")
            return None
        if node.style is not None:
            return text
        if _LEADING_ZERO.fullmatch(text):
            self.problem(node.start_mark, f"a number must not begin with 0, but is {text} instead; write {int(text)} or '{text}'")
        return scalar(text)


class _Dumper(yaml.SafeDumper):
    """Quotes each string that `scalar` would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = scalar(text) is text and not _LEADING_ZERO.fullmatch(text)
    # Outside double quotes PyYAML writes U+0085 and its like bare, and reads them back as line breaks.
    style = '"' if not text.isprintable() else None if plain else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_str)


def show(path: KeyPath) -> str:
    """Writes a path as a user would: `optimizer.betas[0]`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".")
