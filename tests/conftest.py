import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["hora.testing.plugin"]

TESTS = Path(__file__).parent

# Each process of Python that tests start, those of xdist too, begins as the module there says.
_path = [str(TESTS / "startup"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(_path))

# A shell that runs pytest in the background has it, and all it starts, ignore Ctrl-C; the launcher heeds that, as `nohup` asks, and its tests
# would wait for nothing.
for _signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, signal.default_int_handler if _signum is signal.SIGINT else signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spreads the files of each folder evenly over the run.

    Examples compute, faults wait, ranks and parity take turns on all cores: two processes get on best with files of different kinds.
    """
    folders: dict[Path, list[Path]] = {}
    for file in dict.fromkeys(item.path for item in items):
        folders.setdefault(Path(*file.relative_to(TESTS).parts[:1]), []).append(file)
    place = {file: number / len(files) for files in folders.values() for number, file in enumerate(files)}
    items.sort(key=lambda item: place[item.path])


def pytest_collection_finish() -> None:
    """What is there by now, torch above all, is never garbage: collections, of which each test causes some, take a millisecond instead of 200."""
    gc.freeze()


@pytest.fixture(scope="session")
def prove_nest(rank_pools: Any) -> Iterator[Any]:
    """Where the tests of `hora prove` have their processes forked; see `prove_kit`."""
    from prove_kit import Nest

    with Nest(rank_pools.zygote) as nest:
        yield nest
