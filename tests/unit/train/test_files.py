import hashlib
import os
import stat
from pathlib import Path

import pytest

from hora.errors import ConfigError
from hora.train.files import create_file, open_regular, replace_file, write_file, write_result


def test_write_file_gives_size_and_digest(tmp_path):
    assert write_file(tmp_path / "a", [b"ab", memoryview(b"c")]) == (3, hashlib.sha256(b"abc").hexdigest())
    assert (tmp_path / "a").read_bytes() == b"abc"


def test_write_file_continues_after_short_writes(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:2]))
    write_file(tmp_path / "a", [b"abcdefg"])
    assert (tmp_path / "a").read_bytes() == b"abcdefg"


def test_write_file_takes_no_place_that_is_taken(tmp_path):
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("target", "link"):
        with pytest.raises(FileExistsError):
            write_file(tmp_path / name, [b"new"])
    assert (tmp_path / "target").read_bytes() == b"old"


def test_replace_file_replaces_a_link_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    replace_file(tmp_path / "link", b"new")
    assert (tmp_path / "target").read_bytes() == b"old"
    assert (tmp_path / "link").read_bytes() == b"new"
    assert not (tmp_path / "link").is_symlink()


def test_replace_file_keeps_the_old_content_when_the_disk_fails(tmp_path, monkeypatch):
    replace_file(tmp_path / "a", b"old")

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        replace_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/etc/passwd")], ids=["directory", "fifo", "link"])
def test_open_regular_refuses_what_is_no_file(tmp_path, make):
    make(tmp_path / "odd")
    with pytest.raises(OSError), open_regular(tmp_path / "odd"):
        pass


def test_replace_file_writes_into_what_is_no_file(tmp_path):
    """As `--json /dev/null` does; a device that is replaced by a file is lost."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace_file(pipe, b"content")
    assert os.read(reader, 100) == b"content"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path, b"content")


@pytest.mark.parametrize("through_link", [True, False])
def test_a_result_goes_to_the_descriptor_that_its_name_leads_to(tmp_path, through_link):
    """As `--json /dev/stdout > FILE` does: neither the name is replaced by a file, nor what was said before written over."""
    with open(tmp_path / "said", "w+b", buffering=0) as said:
        said.write(b"before ")
        name = tmp_path / "name" if through_link else Path(f"/dev/fd/{said.fileno()}")
        if through_link:
            (tmp_path / "between").symlink_to(f"/proc/self/fd/{said.fileno()}")
            name.symlink_to("between")
        write_result(name, b"result ")
        said.write(b"after")
    assert (tmp_path / "said").read_bytes() == b"before result after"
    assert name.is_symlink() is through_link


def test_a_result_for_a_descriptor_that_is_closed_is_refused(tmp_path):
    (tmp_path / "name").symlink_to("/proc/self/fd/987654")
    with pytest.raises(ConfigError, match="cannot write .*/name: Bad file descriptor"):
        write_result(tmp_path / "name", b"result")


def _refuse(*_):
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("has_links", [True, False])
def test_create_file_overwrites_nothing(tmp_path, monkeypatch, has_links):
    if not has_links:
        monkeypatch.setattr(Path, "hardlink_to", _refuse)
    create_file(tmp_path / "a", [b"mine", b"!"])
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "a", [b"new"])
    assert (tmp_path / "a").read_bytes() == b"mine!"
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "link", [b"new"])
    assert sorted(os.listdir(tmp_path)) == ["a", "link"]


def test_create_file_leaves_nothing_when_it_fails(tmp_path):
    def chunks():
        yield b"one"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        create_file(tmp_path / "a", chunks())
    assert os.listdir(tmp_path) == []
