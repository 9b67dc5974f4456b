"""The configuration file of `horovodrun`: YAML, with its options in sections."""

import difflib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hora import strict_yaml
from hora.errors import ConfigError
from hora.launch.horovodrun_words import CONTROLLERS, WORDS, Word

_PLACES = {word.place: word for word in WORDS if word.place}
_SECTIONS = {place.partition(".")[0] for place in _PLACES}


def read_config(path: Path) -> dict[str, Any]:
    """The words that the file gives, by their names, and `controller`, one of `CONTROLLERS`.

    Raises:
        ConfigError: it cannot be read, or says something that horovodrun does not know; each is named.
    """
    try:
        content = _load(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config-file {path} cannot be read: {getattr(error, 'strerror', None) or error}; check the file") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config-file {path} must hold sections such as `params:`, but holds {type(content).__name__}")
    given: dict[str, Any] = {}
    problems = []
    for place, value in _entries(content):
        try:
            given |= _read(place, value)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(f"--config-file {path}: " + "; ".join(problems))
    return given


def _load(path: Path) -> Any:
    """What the file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no file, not in UTF-8, or not plain YAML (`hora.strict_yaml`); all is told.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it must be a file")
    with path.open(encoding="utf-8") as file:
        text = file.read(strict_yaml.MAX_SIZE_BYTES + 1)
    document = strict_yaml.parse(text, lambda line, column: f"{line}:{column}")
    if document.problems:
        raise ValueError("; ".join(document.problems))
    return document.value


def _entries(content: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Everything that the file says, by its place."""
    for section, entries in content.items():
        if isinstance(entries, dict) and section in _SECTIONS:
            yield from ((f"{section}.{key}", value) for key, value in entries.items())
        elif section in _SECTIONS and entries is not None:
            yield f"{section}, with {entries!r} in the place of keys,", entries
        elif entries is not None or section not in _SECTIONS:
            yield str(section), entries


def _read(place: str, value: Any) -> dict[str, Any]:
    if place == "controller":
        if str(value).lower() not in CONTROLLERS:
            raise ValueError(f"controller must be gloo or mpi, but is {value!r} instead")
        return {"controller": str(value).lower()}
    if place not in _PLACES:
        near = difflib.get_close_matches(place, [*_PLACES, *_SECTIONS, "controller"], n=1)
        advice = f"did you mean {near[0]}?" if near else f"sections are {', '.join(sorted(_SECTIONS))}"
        raise ValueError(f"{place} is not known; {advice}")
    return {} if value is None else {_PLACES[place].name: _checked(_PLACES[place], value)}


def _checked(word: Word, value: Any) -> Any:
    if word.kind == "switch":
        good, wanted = isinstance(value, bool), "true or false"
    elif word.kind == "text":
        good, wanted = isinstance(value, str), "a text"
    else:
        whole = word.kind == "count"
        good = isinstance(value, int if whole else int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        wanted = "a whole number from 0" if whole else "a number from 0"
    if not good:
        raise ValueError(f"{word.place} must be {wanted}, but is {value!r} instead")
    return value
