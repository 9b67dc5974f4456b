"""Files that appear whole or not at all, below everything else."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hora.writing import replace_with


@pytest.mark.parametrize("durable", [True, False])
def test_replace_with_forces_to_the_disk_what_is_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool) -> None:
    forced: list[int] = []
    monkeypatch.setattr(os, "fsync", forced.append)
    for content in (b"old", b"new"):
        replace_with(tmp_path / "a", iter([content, memoryview(b"er")]), durable=durable)
    assert (tmp_path / "a").read_bytes() == b"newer"
    assert os.listdir(tmp_path) == ["a"]
    assert bool(forced) is durable


@pytest.mark.parametrize(("umask", "modes"), [(0o002, (0o664, 0o644)), (0o077, (0o600, 0o600))])
def test_the_umask_takes_from_the_mode(tmp_path: Path, umask: int, modes: tuple[int, int]) -> None:
    before = os.umask(umask)
    try:
        replace_with(tmp_path / "usual", [b"a"], durable=False)
        replace_with(tmp_path / "ours", [b"a"], durable=False, mode=0o644)
    finally:
        os.umask(before)
    assert tuple(stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("usual", "ours")) == modes


@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: path.symlink_to("target")], ids=["pipe", "link"])
def test_what_others_have_planted_is_replaced_and_not_written_to(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    plant(tmp_path / "a")
    replace_with(tmp_path / "a", [b"ours"], durable=False)
    assert stat.S_ISREG((tmp_path / "a").lstat().st_mode)
    assert (tmp_path / "a").read_bytes() == b"ours"
    assert os.listdir(tmp_path) == ["a"]


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")

    def chunks() -> Iterator[bytes]:
        yield b"ne"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        replace_with(tmp_path / "a", chunks(), durable=False)
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]
