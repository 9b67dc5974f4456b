"""A program that makes one save, and nothing else, so that each of its system calls can be struck (`python -m hora.diag.chaos.save DIRECTORY STEP`).

Loads no torch. What it saves tells its step, so that a checkpoint that mixes two would show.
"""

import sys
from pathlib import Path

from hora.train.checkpoint.manifest import CheckpointName, Manifest
from hora.train.checkpoint.retention import Retention
from hora.train.checkpoint.storage import Storage, verify


def save(directory: Path, step: int) -> None:
    """Saves, after clearing away what an earlier save left, and lets the one before go."""
    storage = Storage(directory)
    storage.sweep()
    with storage.write(CheckpointName(0, step)) as draft:
        draft.add("model.safetensors", [b"header", bytes([step]) * 100_000])
        draft.add("model.json", [b"%d" % step])
        storage.commit(draft, Manifest(1, "0", "0", step, 0, 0, 1, 1, None, "a machine", None, "", draft.files))
    Retention(keep_last=1, keep_best=0).prune(storage)


def whole_steps(directory: Path) -> list[int]:
    """The steps of the checkpoints that a loader would see.

    Raises:
        CheckpointIncomplete: one of them is not whole.
    """
    names = Storage(directory).names()
    for name in names:
        verify(directory / str(name))
        if (directory / str(name) / "model.json").read_text() != str(name.step):
            raise ValueError(f"{name} holds the files of another step")
    return [name.step for name in names]


if __name__ == "__main__":
    save(Path(sys.argv[1]), int(sys.argv[2]))
