"""Configuration: one tree of dataclasses, filled from defaults, a YAML file and `--set a.b=value`, and strict about all three.

Every problem is reported at once, with its place and the nearest known name. Types are never bent: `"3"` is no integer, `true` is no
number; only an integer may stand for a float. Relies on pydantic to compare values with annotations (`Literal`, `Optional`, `list`,
`tuple`, nested dataclasses, `Path`, bounds through `Annotated`). Reads no environment variable.
"""

import difflib
import errno
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from hora import strict_yaml
from hora.errors import ConfigError
from hora.strict_yaml import KeyPath, show

T = TypeVar("T")

_DEFAULTS = "the defaults"
_STRICT = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants")


def load_config(cls: type[T], path: Path | None = None, overrides: Sequence[str] = (), defaults: Mapping[str, Any] | None = None) -> T:
    """Builds a `cls` from `defaults`, the YAML file at `path` and `overrides`, the later over the earlier.

    Mappings are merged key by key; any other value replaces the one before.

    Args:
        cls: a dataclass; its own defaults fill what nobody gives.
        path: a YAML file of at most 1 MiB in UTF-8.
        overrides: texts such as `optimizer.lr=0.5`; the value is read as YAML.
        defaults: nested plain data, for example a named configuration.

    Raises:
        ConfigError: a key is unknown, missing or duplicate, a value has the wrong type or breaks a bound, or a text is no YAML; the message
            lists all of them.
    """
    draft = _Draft()
    draft.merge(defaults or {}, lambda _: _DEFAULTS)
    if path is not None:
        draft.read_file(path)
    for override in overrides:
        draft.read_override(override)
    if draft.readable:
        try:
            (config,) = _adapter(cls).validate_json(json.dumps([draft.values]))
        except ValidationError as error:
            draft.problems += _explain(cls, draft, error)
        else:
            if not draft.problems:
                return config  # type: ignore[no-any-return]
    raise ConfigError(_report(draft.problems))


def dump_config(config: Any) -> str:
    """Writes a configuration as YAML text from which `load_config` builds an equal one."""
    (plain,) = _adapter(type(config)).dump_python((config,), mode="json")
    return strict_yaml.dump(plain)


def _adapter(cls: type) -> TypeAdapter[Any]:
    # The tuple around the dataclass carries the strict settings down into it; on a bare dataclass pydantic refuses them.
    return TypeAdapter(tuple[cls], config=_STRICT)  # type: ignore[valid-type]


@dataclass
class _Draft:
    """Values gathered so far, with the place each came from and the problems met."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    readable: bool = True

    def read_file(self, path: Path) -> None:
        try:
            text = _read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            self._unreadable([f"{path}: the configuration file cannot be read: {_cause(error)}"])
            return
        document = strict_yaml.parse(text, lambda line, column: f"{path}:{line}:{column}")
        value = {} if document.value is None else document.value
        if not isinstance(value, dict):
            self._unreadable([f"{path}:1:1: a configuration must be a mapping of keys to values, but is {_found(value)} instead"])
        elif document.value is None and document.problems:
            self._unreadable(document.problems)
        else:
            self.problems += document.problems
            self.places.setdefault((), f"{path}:1:1")
            self.merge(value, document.places.__getitem__)

    def read_override(self, override: str) -> None:
        place = f"--set {override}"
        name, equals, text = override.partition("=")
        keys = name.strip().split(".")
        if not equals or not all(keys):
            self.problems.append(f"{place}: an override must read key.key=value")
            return
        document = strict_yaml.parse(text, lambda *_: place)
        self.problems += document.problems
        if document.value is None and document.problems:
            return
        value = document.value
        for key in reversed(keys):
            value = {key: value}
        self.merge(value, lambda _: place)

    def merge(self, source: Mapping[str, Any], place_of: Callable[[KeyPath], str]) -> None:
        self._merge(self.values, source, (), place_of)

    def _merge(self, target: dict[str, Any], source: Mapping[str, Any], path: KeyPath, place_of: Callable[[KeyPath], str]) -> None:
        for key, value in source.items():
            here = (*path, key)
            if isinstance(value, Mapping):
                if not isinstance(target.get(key), dict):
                    target[key] = {}
                    self.places[here] = place_of(here)
                self._merge(target[key], value, here, place_of)
            else:
                target[key] = value
                self.places.update((inner, place_of(inner)) for inner in _paths(value, here))

    def place(self, path: KeyPath) -> str:
        """Where the value at `path` was given, or else the nearest value around it; of a default mapping, where what is new in it was."""
        inside = [place for inner, place in self.places.items() if inner[:-1] == path and place != _DEFAULTS]
        if inside and self.places.get(path) == _DEFAULTS:
            return ", ".join(dict.fromkeys(inside))
        while path not in self.places and path:
            path = path[:-1]
        return self.places.get(path, "the configuration")

    def _unreadable(self, problems: list[str]) -> None:
        self.readable = False
        self.problems += problems


def _read_text(path: Path) -> str:
    if not path.is_file() and path.exists():
        raise OSError(errno.EINVAL, "it is no regular file")
    with path.open("rb") as file:
        # One byte more than allowed is enough to see that the file is too long.
        return file.read(strict_yaml.MAX_SIZE_BYTES + 1).decode("utf-8-sig")


def _paths(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """The path of `value` and of everything inside it."""
    yield path
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from _paths(item, (*path, key))


def _explain(cls: type, draft: _Draft, error: ValidationError) -> Iterator[str]:
    """One line for each value that is wrong; the branches of a union that all failed share one."""
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False, include_context=True):
        by_path.setdefault(_path_of(detail, draft.values), []).append(detail)
    for path, details in by_path.items():
        yield f"{draft.place(path)}: {_describe(cls, path, details)}"


def _path_of(detail: ErrorDetails, values: Any) -> KeyPath:
    """The path in the user's data: pydantic's location without the names of union branches that it adds."""
    location = detail["loc"][1:]
    absent = location[-1:] if detail["type"] == "missing" else ()
    path: KeyPath = ()
    for key in location[: len(location) - len(absent)]:
        try:
            values = values[key]
        except (KeyError, IndexError, TypeError):
            break
        path = (*path, key)
    return (*path, *absent)


def _describe(cls: type, path: KeyPath, details: Sequence[ErrorDetails]) -> str:
    first, name = details[0], show(path)
    if first["type"] == "missing":
        return f"`{name}` is missing"
    if first["type"] == "unexpected_keyword_argument":
        return f"unknown key `{name}`{_suggest_key(cls, path)}"
    if first["type"] == "value_error":
        return f"`{name}`: {first['ctx']['error']}" if name else str(first["ctx"]["error"])
    demands = " or ".join(dict.fromkeys(map(_demand, details)))
    return f"`{name}` must {demands}, but is {_found(first['input'])} instead{_suggest_choice(first)}"


def _demand(detail: ErrorDetails) -> str:
    return "be a mapping" if detail["type"] == "dataclass_type" else re.sub(r"^\w+ should ", "", detail["msg"])


def _suggest_key(cls: type, path: KeyPath) -> str:
    *parents, key = path
    known = sorted(_keys_at(cls, parents))
    elsewhere = (show(other) for other in _all_paths(cls) if other[-1] == key)
    siblings = (show((*parents, other)) for other in difflib.get_close_matches(str(key), known, n=1))
    nearest = next(chain(elsewhere, siblings), None)
    return f"; did you mean `{nearest}`?" if nearest else f"; known here: {', '.join(known) or 'nothing'}"


def _suggest_choice(detail: ErrorDetails) -> str:
    choices = re.findall(r"'([^']*)'", detail.get("ctx", {}).get("expected", "") if detail["type"] in ("literal_error", "enum") else "")
    nearest = difflib.get_close_matches(str(detail["input"]), choices, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def _keys_at(cls: type, path: Iterable[str | int]) -> set[str]:
    owners = [cls]
    for key in path:
        if isinstance(key, str):
            owners = [inner for owner in owners for inner in _dataclasses_in(get_type_hints(owner).get(key))]
    return {item.name for owner in owners for item in fields(owner)}


def _dataclasses_in(annotation: Any) -> Iterator[type]:
    if is_dataclass(annotation) and isinstance(annotation, type):
        yield annotation
    for argument in get_args(annotation):
        yield from _dataclasses_in(argument)


def _all_paths(cls: type, around: tuple[type, ...] = ()) -> Iterator[KeyPath]:
    hints = get_type_hints(cls)
    for item in fields(cls):
        yield (item.name,)
        for inner in _dataclasses_in(hints[item.name]):
            if inner not in (*around, cls):
                yield from ((item.name, *path) for path in _all_paths(inner, (*around, cls)))


def _found(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _cause(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8"


def _report(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join((f"the configuration has {len(problems)} problems:", *problems))
