"""What the benches with commands of their own have in common: lists of names, and requests on their way to the ranks. Loads no torch."""

import json
from collections.abc import Sequence
from typing import Any

from hora.errors import ConfigError


def names(what: str, words: str, known: Sequence[str]) -> tuple[str, ...]:
    """The names in `words`, between commas, each once.

    Raises:
        ConfigError: one is not `known`; the message lists those that are.
    """
    found = tuple(dict.fromkeys(word.strip() for word in words.split(",")))
    for name in found:
        if name not in known:
            raise ConfigError(f'unknown {what} "{name}"; choose from: {", ".join(known)}')
    return found


def fields_of(text: str) -> dict[str, Any]:
    """The fields of a request from its JSON, which has lists where the request has tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(text).items()}
