"""Whether checkpoints of several runs mean the same words by the same numbers. Reads the files of all recipes that have words; imports no torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hora.errors import CheckpointError, CheckpointMismatch

FILE_NAME: Final = "vocab.json"
"""Where a run directory keeps its vocabularies."""


def require_same_vocabularies(checkpoints: Sequence[Path]) -> None:
    """Compares the vocabularies of the runs that `checkpoints` lie in; those that lie in no run with words are not compared.

    Raises:
        CheckpointMismatch: they differ.
        CheckpointError: one cannot be read.
    """
    places = list(dict.fromkeys(filter(None, map(_kept_with, checkpoints))))
    kept = {place: _read(place) for place in places}
    for place in places[1:]:
        first = places[0]
        if differences := _differences(kept[first], kept[place]):
            raise CheckpointMismatch(
                f"the checkpoints must be of models with the same vocabularies, but {first} and {place} differ: {'; '.join(differences)}. "
                "Give checkpoints of one run, or of runs with the same vocabularies"
            )


def _kept_with(checkpoint: Path) -> Path | None:
    """The file of the run whose checkpoint it is, which stands in the run directory or in `checkpoints` there."""
    parents = checkpoint.resolve().parents
    return next((place / FILE_NAME for place in parents[:2] if (place / FILE_NAME).is_file()), None)


def _read(path: Path) -> dict[str, Mapping[str, Any]]:
    """The vocabulary of each side of a translation, or the only one of a language model, as plain data."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        sides = content.get("vocabularies")
        found = {"words": content} if sides is None else {"source": sides[0], "target": sides[-1]}
        return {name: {key: value for key, value in side.items() if key not in ("format", "digest")} for name, side in found.items()}
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} must hold the vocabularies of the run, but cannot be read: {error!r}") from error


def _differences(one: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if one.keys() != other.keys():
        return ["one is of a language model, one of a translation model"]
    return [f"{name}: {_difference(side, other[name])}" for name, side in one.items() if side != other[name]]


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    words, others = one.get("words"), other.get("words")
    if not (isinstance(words, list) and isinstance(others, list)) or words == others:
        return f"other {', '.join(sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key)))}"
    place = next((place for place, pair in enumerate(zip(words, others, strict=False)) if pair[0] != pair[1]), None)
    counts = f"{len(words)} words and {len(others)}"
    return counts if place is None else f"{counts}, of which word {place + 1} is {words[place]!r} and {others[place]!r}"
