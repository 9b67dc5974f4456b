"""Where the logs of jobs go, and how long they stay."""

import os
import subprocess
from pathlib import Path

import pytest

from hora.errors import ConfigError
from hora.launch.logs import KEPT_JOBS, log_directory, open_streams, remove_oldest
from hora.rendezvous.key import user_key


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HORA_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def test_logs_go_below_the_state_directory_and_stay(state: Path) -> None:
    with log_directory(None, "4f") as path:
        (path / "rank0.log").touch()
    assert path.parent == state / "logs"
    assert path.name.endswith("-4f")
    assert [entry.name for entry in path.iterdir()] == ["rank0.log"]


def test_others_write_to_none_of_the_directories_whatever_the_umask(state: Path) -> None:
    """The user's key lies beside the logs, and is refused where others could put another one in its place."""
    before = os.umask(0o002)
    try:
        with log_directory(None, "4f") as path:
            assert {place.stat().st_mode & 0o777 for place in (state, state / "logs", path)} == {0o700}
        user_key()
    finally:
        os.umask(before)


def test_a_job_that_ends_while_it_is_looked_at_disturbs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("20200101-000000-x", "20200101-000001-x"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(Path, "exists", lambda _: True)  # it was there a moment ago
    remove_oldest(tmp_path, kept=1)
    assert [path.name for path in tmp_path.iterdir()] == ["20200101-000001-x"]


def test_the_newest_are_kept(state: Path) -> None:
    for index in range(KEPT_JOBS + 5):
        (state / "logs" / f"20200101-{index:06}-x").mkdir(parents=True)
    with log_directory(None, "4f") as path:
        names = sorted(entry.name for entry in (state / "logs").iterdir())
    assert len(names) == KEPT_JOBS
    assert names[0] == "20200101-000006-x"
    assert names[-1] == path.name


def test_logs_of_running_jobs_are_kept(state: Path) -> None:
    with log_directory(None, "4f") as running:
        (running.parent / "20990101-000000-x").mkdir()
        remove_oldest(running.parent, kept=1)
        assert running.exists()
    remove_oldest(running.parent, kept=1)
    assert not running.exists()


def test_logs_of_a_killed_launcher_are_not_kept_for_ever(tmp_path: Path) -> None:
    dead = tmp_path / "20200101-000000-x"
    dead.mkdir()
    (dead / ".running").touch()
    (tmp_path / "20200101-000001-x").mkdir()
    remove_oldest(tmp_path, kept=1)
    assert not dead.exists()


def test_a_named_directory_is_made_and_left_as_it_is(tmp_path: Path) -> None:
    with log_directory(tmp_path / "a" / "b", "4f") as path:
        assert path == tmp_path / "a" / "b"
    assert list(path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="cannot be made: .*; name another with --log-dir"),
        log_directory(tmp_path / "file" / "logs", "4f"),
    ):
        pass


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "logs"
    target.mkdir()
    if os.geteuid() == 0:
        # Modes do not stop root; a read-only file system does.
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(target)], capture_output=True, check=False)
        if mounted.returncode:
            pytest.skip("nothing can be mounted here")
    else:
        target.chmod(0o500)
    try:
        with pytest.raises(ConfigError, match="must be writable, but is not; name another with --log-dir"), log_directory(target, "4f"):
            pass
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", str(target)], check=True)


def test_streams_are_kept_apart_under_horovods_names_and_appended_to(tmp_path: Path) -> None:
    for text in (b"one ", b"two"):
        streams = open_streams(tmp_path / "out", [0, 10], world_size=11)
        for (rank, number), log in streams.items():
            log.write(b"%d.%d " % (rank, number) + text)
            log.close()
    kept = {path.relative_to(tmp_path / "out").as_posix(): path.read_text() for path in (tmp_path / "out").rglob("std*")}
    assert kept == {
        "rank.00/stdout": "0.0 one 0.0 two",
        "rank.00/stderr": "0.1 one 0.1 two",
        "rank.10/stdout": "10.0 one 10.0 two",
        "rank.10/stderr": "10.1 one 10.1 two",
    }
