"""What a program asks of ranks, and what they leave for it, as files of one private directory. Loads no torch.

`request.json` names the function, `arguments` holds what it is given; each rank leaves `result-N`, or `error-N.json`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hora.writing import replace_with


@dataclass(frozen=True)
class Request:
    """A call: the function as `functions.describe` says it, and where Python looks for modules."""

    function: Mapping[str, str]
    sys_path: Sequence[str]

    def write(self, directory: Path) -> None:
        """Leaves it for the ranks."""
        (directory / "request.json").write_text(json.dumps(asdict(self)), encoding="ascii")

    @classmethod
    def read(cls, directory: Path) -> "Request":
        """Reads what `write` left."""
        return cls(**json.loads((directory / "request.json").read_text(encoding="ascii")))


@dataclass(frozen=True)
class Failure:
    """An exception on a rank: its last line, and all of it."""

    summary: str
    trace: str

    def write(self, directory: Path, rank: int) -> None:
        """Leaves it for the program that called."""
        replace_with(directory / f"error-{rank}.json", [json.dumps(asdict(self)).encode("ascii")], durable=False)

    @classmethod
    def read(cls, directory: Path, rank: int) -> "Failure | None":
        """What a rank left, if it did."""
        path = directory / f"error-{rank}.json"
        return cls(**json.loads(path.read_text(encoding="ascii"))) if path.exists() else None


def arguments_path(directory: Path) -> Path:
    """Where the arguments are."""
    return directory / "arguments"


def result_path(directory: Path, rank: int) -> Path:
    """Where a rank's result is to be."""
    return directory / f"result-{rank}"
