import os
import stat
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hora import env
from hora.errors import LaunchError
from hora.rendezvous.key import new_key, read_key, user_key, write_key

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def test_keys_are_32_bytes_and_never_the_same() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert {len(key) for key in keys} == {32}


def test_written_key_is_read_back(tmp_path: Path) -> None:
    key = new_key()
    write_key(tmp_path / "key", key)
    assert read_key(tmp_path / "key") == key


def test_key_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_key(tmp_path / "key", new_key())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_writing_leaves_an_existing_file_alone_and_no_draft_behind(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("mine")
    with pytest.raises(FileExistsError):
        write_key(tmp_path / "key", new_key())
    assert (tmp_path / "key").read_text() == "mine"
    assert os.listdir(tmp_path) == ["key"]


@pytest.mark.parametrize("target_exists", [True, False])
def test_writing_does_not_follow_a_planted_link(tmp_path: Path, target_exists: bool) -> None:
    target = tmp_path / "target"
    if target_exists:
        target.write_text("precious")
    (tmp_path / "key").symlink_to(target)
    with pytest.raises(FileExistsError):
        write_key(tmp_path / "key", new_key())
    assert target.exists() == target_exists
    assert not target_exists or target.read_text() == "precious"


def test_reading_does_not_follow_a_link(tmp_path: Path) -> None:
    write_key(tmp_path / "real", new_key())
    (tmp_path / "key").symlink_to(tmp_path / "real")
    with pytest.raises(LaunchError, match="must be a regular file of yours"):
        read_key(tmp_path / "key")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o604])
def test_reading_refuses_a_file_that_others_may_open(tmp_path: Path, mode: int) -> None:
    write_key(tmp_path / "key", new_key())
    (tmp_path / "key").chmod(mode)
    with pytest.raises(LaunchError, match=f"by its owner alone, but has mode {mode:04o}"):
        read_key(tmp_path / "key")


@as_root
def test_reading_refuses_another_users_file(tmp_path: Path) -> None:
    write_key(tmp_path / "key", new_key())
    os.chown(tmp_path / "key", 65534, 65534)
    with pytest.raises(LaunchError, match="but belongs to 65534"):
        read_key(tmp_path / "key")


def test_reading_refuses_a_pipe_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(LaunchError, match="regular file"):
        read_key(tmp_path / "key")


def test_reading_an_absent_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="copy the key file of the first node"):
        read_key(tmp_path / "key")


@pytest.mark.parametrize("content", ["", "c0ffee", "not-hexadecimal-but-secret-all-the-same", "00" * 33])
def test_file_without_a_key_is_refused_without_being_quoted(tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content)
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(LaunchError, match="must hold 64 hexadecimal digits") as caught:
        read_key(tmp_path / "key")
    assert not content or content not in "".join(traceback.format_exception(caught.value))


def test_user_key_is_made_once_however_many_ask_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.STATE_DIR, str(tmp_path / "state"))
    start = threading.Barrier(8)

    def ask() -> bytes:
        start.wait()
        return user_key()

    with ThreadPoolExecutor(8) as pool:
        keys = {future.result() for future in [pool.submit(ask) for _ in range(8)]}
    assert len(keys) == 1
    assert keys == {user_key()}
    assert os.listdir(tmp_path / "state") == ["key"]
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


def test_user_key_refuses_a_directory_that_others_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o770)
    monkeypatch.setenv(env.STATE_DIR, str(tmp_path))
    with pytest.raises(LaunchError, match=r"writable by its owner alone, but has mode 0770; run `chmod go-w"):
        user_key()
