"""The folder that ranks share: whose it must be, what is read from it, and when it is removed."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hora.comm import shared_directory
from hora.comm.owner import Owner
from hora.comm.shared_directory import ABANDONED_S, Folder, Handle, SharedDirectory, choose_shared_dir, sweep
from hora.errors import ConfigError

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
OTHER_USER = 65534


@pytest.fixture(autouse=True)
def little_patience(monkeypatch):
    monkeypatch.setattr(shared_directory, "PATIENCE_S", 0.1)


@pytest.fixture
def folder(tmp_path):
    made = Folder.make(tmp_path)
    yield made
    made.close()


def test_the_argument_comes_before_the_variable(tmp_path):
    environ = {"HORA_SHARED_DIR": str(tmp_path)}
    (tmp_path / "own").mkdir()
    assert choose_shared_dir(None, environ) == tmp_path
    assert choose_shared_dir(str(tmp_path / "own"), environ) == tmp_path / "own"
    assert choose_shared_dir(None, {}) is None
    assert choose_shared_dir(None, {"HORA_SHARED_DIR": ""}) is None


@pytest.mark.parametrize(
    ("mode", "accepted"), [(0o700, True), (0o755, True), (0o2770, True), (0o1777, True), (0o777, False), (0o757, False)]
)
def test_others_must_not_be_able_to_rename_what_is_in_it(tmp_path, mode, accepted):
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(mode)
    if accepted:
        assert choose_shared_dir(path, {}) == path
    else:
        with pytest.raises(
            ConfigError, match=r"must be a directory in which other users cannot rename ours, but .*/shared may be written by all"
        ):
            choose_shared_dir(path, {})


@root_only
def test_what_all_may_write_must_be_ours_or_roots(tmp_path):
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o1777)
    os.chown(path, OTHER_USER, OTHER_USER)
    with pytest.raises(ConfigError, match="may be written by all and belongs to another user"):
        choose_shared_dir(path, {})
    path.chmod(0o755)
    assert choose_shared_dir(path, {}) == path


def test_what_is_no_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(ConfigError, match="file is no directory"):
        choose_shared_dir(tmp_path / "file", {})
    with pytest.raises(ConfigError, match=r"link is a symbolic link; give .*/real itself"):
        choose_shared_dir(tmp_path / "link", {})
    with pytest.raises(ConfigError, match="absent cannot be looked at: No such file"):
        choose_shared_dir(None, {"HORA_SHARED_DIR": str(tmp_path / "absent")})


def write(folder: Folder, content: bytes) -> Handle:
    with folder.writing() as writer:
        writer.write(memoryview(content[:3]))
        writer.write(memoryview(content[3:]))
    return writer.handle


def read(folder: Folder, handle: Handle) -> bytes:
    target = bytearray(handle.size_bytes)
    with folder.reading(handle) as reader:
        reader.fill(memoryview(target)[:2])
        reader.fill(memoryview(target)[2:])
    return bytes(target)


def test_another_process_reads_what_one_has_written(tmp_path, folder):
    other = Folder.open(tmp_path, folder.path.name)
    handle = write(folder, b"precious")
    assert read(other, handle) == b"precious"
    assert other.token == folder.token
    assert stat.S_IMODE((folder.path / handle.name).stat().st_mode) == 0o600
    folder.remove(handle.name)
    other.close()
    assert sorted(path.name for path in folder.path.iterdir()) == ["owner", "token"]


def test_nothing_is_left_of_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_directory.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        Folder.make(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_the_one_that_made_it_removes_it(tmp_path):
    made = Folder.make(tmp_path)
    Folder.open(tmp_path, made.path.name).close()
    assert made.path.exists()
    write(made, b"left behind")
    shared = SharedDirectory(tmp_path)
    shared.folder = made
    shared.close()
    shared.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_there_as_a_whole_or_not_at_all(folder):
    with pytest.raises(OSError, match="no space"), folder.writing() as writer:
        writer.write(memoryview(b"half"))
        raise OSError("no space")
    assert sorted(path.name for path in folder.path.iterdir()) == ["owner", "token"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(b"preciouS"), "its digest must be .*, but is .* instead: it was changed or damaged"),
        (lambda path: path.write_bytes(b"pre"), "it must be a file of 8 bytes of this user, but has 3"),
        (lambda path: path.write_bytes(b"precious and more"), "it must be a file of 8 bytes"),
        (lambda path: path.unlink(), "No such file"),
        (lambda path: (path.rename(path.with_name("moved")), path.symlink_to("moved")), "symbolic link"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "it must be a file of 8 bytes"),
    ],
    ids=["a bit", "shorter", "longer", "removed", "link", "pipe"],
)
def test_what_is_not_what_was_written_is_refused(folder, change, message):
    handle = write(folder, b"precious")
    change(folder.path / handle.name)
    with pytest.raises(OSError, match=message):
        read(folder, handle)


def test_files_elsewhere_are_not_read(tmp_path, folder):
    (tmp_path / "secret").write_bytes(b"precious")
    with pytest.raises(OSError, match="a file of ours cannot be called '../secret'"):
        read(folder, write(folder, b"precious")._replace(name="../secret"))


def test_a_file_that_shows_late_is_waited_for(folder, monkeypatch):
    monkeypatch.setattr(shared_directory, "PATIENCE_S", 10.0)
    handle = write(folder, b"precious")
    path = folder.path / handle.name
    path.rename(path.with_name("late"))
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            path.with_name("late").rename(path)

    monkeypatch.setattr(shared_directory.time, "sleep", nap)
    assert read(folder, handle) == b"precious"
    assert len(naps) == 3


@pytest.mark.parametrize("name", ["..", "hora-objects-../../etc", "hora-objects-0123", "/etc", ""])
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="must be called hora-objects-"):
        Folder.open(tmp_path, name)


def plant(base: Path) -> Path:
    return base / f"hora-objects-{0:032x}"


def test_a_folder_that_is_not_ours_alone_is_refused(tmp_path):
    plant(tmp_path).mkdir()
    plant(tmp_path).chmod(0o777)
    with pytest.raises(ConfigError, match=r"must be its user's alone \(mode 0700\), but .* has mode 0777"):
        Folder.open(tmp_path, plant(tmp_path).name)


@root_only
def test_a_folder_of_another_user_is_refused(tmp_path):
    plant(tmp_path).mkdir(mode=0o700)
    os.chown(plant(tmp_path), OTHER_USER, OTHER_USER)
    with pytest.raises(ConfigError, match=f"belongs to user {OTHER_USER}"):
        Folder.open(tmp_path, plant(tmp_path).name)


def test_a_planted_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    plant(tmp_path).symlink_to("elsewhere")
    with pytest.raises(OSError, match=r"Not a directory|symbolic link"):
        Folder.open(tmp_path, plant(tmp_path).name)
    assert sweep(tmp_path) == []


def leave(base: Path, owner: str) -> Path:
    """What a job leaves that ends without a word."""
    path = plant(base)
    path.mkdir(mode=0o700)
    (path / "owner").write_text(owner)
    (path / "data").write_text("large")
    return path


def age(path: Path) -> None:
    old = time.time() - ABANDONED_S - 60
    os.utime(path, (old, old))


def dead() -> str:
    command = [sys.executable, "-c", "from hora.comm.owner import Owner; print(Owner.current().token)"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_folder_of_a_dead_process_of_this_machine_is_swept(tmp_path):
    path = leave(tmp_path, dead())
    assert sweep(tmp_path) == [path]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_a_living_job_is_not_swept(tmp_path, folder):
    age(folder.path)
    assert sweep(tmp_path) == []
    assert folder.path.exists()


@pytest.mark.parametrize("owner", ["00000000-1-1", ""])
def test_a_folder_of_another_machine_is_swept_when_it_is_old_and_free(tmp_path, owner):
    path = leave(tmp_path, owner)
    assert sweep(tmp_path) == []
    age(path)
    assert sweep(tmp_path) == [path]


def test_an_old_folder_of_another_machine_that_is_locked_is_not_swept(tmp_path, folder):
    (folder.path / "owner").write_text("00000000-1-1")
    age(folder.path)
    assert sweep(tmp_path) == []


def test_where_locks_cannot_be_asked_for_nothing_of_other_machines_is_swept(tmp_path, monkeypatch):
    import fcntl

    def no_locks(*_):
        raise OSError(37, "No locks available")

    path = leave(tmp_path, "00000000-1-1")
    age(path)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert sweep(tmp_path) == []


def test_what_others_called_alike_is_not_swept(tmp_path):
    for name in ("hora-objects-mine", "hora-objects", f"hora-objects-{0:033x}"):
        (tmp_path / name).mkdir(mode=0o700)
        age(tmp_path / name)
    assert sweep(tmp_path) == []


@root_only
def test_another_users_folder_is_not_swept(tmp_path):
    path = leave(tmp_path, dead())
    age(path)
    os.chown(path, OTHER_USER, OTHER_USER)
    assert sweep(tmp_path) == []


def test_the_owner_is_this_process(folder):
    assert (folder.path / "owner").read_text() == Owner.current().token
