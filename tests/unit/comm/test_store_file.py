"""What a file that ranks are to meet in may hold: what torch has written, whole, and nothing else."""

import fcntl
import os
from datetime import timedelta
from pathlib import Path

import pytest

from hora.comm.deadline import Deadline
from hora.comm.store_file import require_store
from hora.comm.torch_private import FileStore
from hora.errors import ConfigError, RendezvousTimeout


@pytest.fixture
def written(tmp_path: Path) -> bytes:
    """What torch leaves behind keys that are set, counted and deleted."""
    path = tmp_path / "written"
    store = FileStore(str(path), 2)
    store.set_timeout(timedelta(seconds=10))
    store.set("rank", "a record")
    store.set("none", "")
    store.add("arrived", 1)
    store.delete_key("rank")
    return path.read_bytes()


def test_what_torch_has_written_passes(written: bytes, tmp_path: Path) -> None:
    path = tmp_path / "store"
    require_store(path, Deadline(1.0))
    path.touch()
    require_store(path, Deadline(1.0))
    path.write_bytes(written)
    require_store(path, Deadline(1.0))
    assert path.read_bytes() == written


def test_half_of_it_is_refused_wherever_it_ends(written: bytes, tmp_path: Path) -> None:
    path = tmp_path / "store"
    whole = []
    for size in range(1, len(written) + 1):
        path.write_bytes(written[:size])
        try:
            require_store(path, Deadline(1.0))
        except ConfigError:
            continue
        whole.append(size)
    assert whole[-1] == len(written)
    assert len(whole) == 5  # behind the count of users, two keys that are set, one that is counted, and one that is deleted
    for size in whole:
        path.write_bytes(written[:size])
        FileStore(str(path), 2).num_keys()  # torch comes to an end too


@pytest.mark.parametrize(
    "content", [b"x", b"word for word, for a while", bytes(4096), bytes(range(256))], ids=["byte", "text", "zeros", "all"]
)
def test_something_else_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(content)
    with pytest.raises(ConfigError, match="must name a file that does not exist yet"):
        require_store(tmp_path / "store", Deadline(1.0))


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="must name a file that does not exist yet"):
            require_store(path, Deadline(1.0))


def test_a_file_that_another_process_has_locked_is_waited_for_until_the_deadline(written: bytes, tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_bytes(written)
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RendezvousTimeout, match="has locked"):
            require_store(path, Deadline(0.1))
    require_store(path, Deadline(0.1))
