"""A user without a home directory, as in containers whose user nobody has named: what needs none works, what does says so."""

from pathlib import Path

import pytest

from hora import env
from hora.comm.algorithms import own_algorithm_table
from hora.comm.backends.shm import build
from hora.errors import ConfigError, LaunchError
from hora.rendezvous.key import user_key


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    for name in (env.STATE_DIR, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("homeless")
def test_what_needs_a_home_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"no home directory to keep keys and logs in; name a directory in HORA_STATE_DIR"):
        user_key()
    assert env.state_dir({env.STATE_DIR: "/elsewhere"}) == Path("/elsewhere")


@pytest.mark.usefixtures("homeless")
def test_ranks_do_without() -> None:
    assert own_algorithm_table() is None
    with pytest.raises(OSError, match="XDG_CACHE_HOME names another directory"):  # and sums are made in Python
        build._cache_directory()


def test_a_state_directory_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(env.STATE_DIR, str(tmp_path / "file" / "state"))
    with pytest.raises(LaunchError, match=r"the user's key cannot be made at .*state/key: Not a directory; .* HORA_STATE_DIR"):
        user_key()
