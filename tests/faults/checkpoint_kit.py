"""What the tests of interrupted saves have in common."""

from pathlib import Path

from hora.train.checkpoint.manifest import CheckpointName
from hora.train.checkpoint.storage import Storage, verify


def look(directory: Path) -> list[CheckpointName]:
    """The checkpoints that a loader would see, each of which must be whole."""
    names = Storage(directory).names()
    for name in names:
        manifest = verify(directory / str(name))
        assert (directory / str(name) / "model.json").read_text() == str(name.step) == str(manifest.step)
    return names
