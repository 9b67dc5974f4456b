"""The private directory of a job, and the sweep."""

import os
import stat
import time
from pathlib import Path

import pytest

from hora.errors import ConfigError
from hora.launch.job_directory import base_directory, job_directory, sweep


def age(path: Path) -> None:
    old = time.time() - 60
    os.utime(path, (old, old))


def test_it_is_private_and_goes_with_what_is_in_it(tmp_path: Path) -> None:
    with job_directory(tmp_path) as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert path.parent == tmp_path
        (path / "key").write_text("secret")
    assert list(tmp_path.iterdir()) == []


def test_it_goes_after_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), job_directory(tmp_path):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_no_two_are_the_same(tmp_path: Path) -> None:
    with job_directory(tmp_path) as first, job_directory(tmp_path) as second:
        assert first != second


def test_a_base_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set TMPDIR to another place"), job_directory(tmp_path / "missing"):
        pass


def test_what_nobody_holds_is_swept(tmp_path: Path) -> None:
    dead = tmp_path / "hora-job-0123456789abcdef"
    dead.mkdir()
    (dead / "key").touch()
    age(dead)
    assert sweep(tmp_path) == [dead]
    assert not dead.exists()


def test_a_living_launchers_directory_is_not_swept(tmp_path: Path) -> None:
    with job_directory(tmp_path) as path:
        age(path)
        assert sweep(tmp_path) == []
        assert path.exists()


def test_a_directory_that_is_just_being_made_is_not_swept(tmp_path: Path) -> None:
    (tmp_path / "hora-job-0123456789abcdef").mkdir()
    assert sweep(tmp_path) == []


def test_what_is_not_ours_is_not_swept(tmp_path: Path) -> None:
    for name in ("mine", "hora-job-results", "hora-job-0123456789abcdefg", "hora-0123456789abcdef"):
        (tmp_path / name).mkdir()
        age(tmp_path / name)
    assert sweep(tmp_path) == []


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "file").touch()
    age(target)
    link = tmp_path / "hora-job-0123456789abcdef"
    link.symlink_to(target)
    old = time.time() - 60
    os.utime(link, (old, old), follow_symlinks=False)
    assert sweep(tmp_path) == []
    assert (target / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_not_swept(tmp_path: Path) -> None:
    foreign = tmp_path / "hora-job-0123456789abcdef"
    foreign.mkdir()
    os.chown(foreign, 65534, 65534)
    age(foreign)
    assert sweep(tmp_path) == []


def test_the_base_is_tmpdir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/somewhere")
    assert base_directory() == Path("/somewhere")
    monkeypatch.setenv("TMPDIR", "")
    assert base_directory() == Path("/tmp")
