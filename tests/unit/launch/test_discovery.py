"""The user's command that says which hosts there are."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hora.errors import ConfigError
from hora.launch.discovery import Discovery, read_command
from hora.launch.hosts import Host


def ask(discovery: Discovery) -> tuple[Host, ...]:
    discovery.begin(time.monotonic())
    while (hosts := discovery.poll(time.monotonic())) is None:
        time.sleep(0.002)
    assert not discovery.pids
    return hosts


@pytest.fixture
def files() -> Iterator[None]:
    """No descriptor is left open."""
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.usefixtures("files")
def test_it_is_asked_again_and_again(tmp_path: Path) -> None:
    listed = tmp_path / "two words"
    discovery = Discovery(read_command(f"cat '{listed}'"))
    listed.write_text("# all\nalpha:2\n\nbeta slots=3 # mine\ngamma\n")
    assert ask(discovery) == (Host("alpha", 2), Host("beta", 3), Host("gamma"))
    listed.write_text("delta\n")
    assert ask(discovery) == (Host("delta"),)


def test_a_host_that_is_named_twice_is_one_host() -> None:
    assert ask(Discovery(("printf", "alpha\nbeta:2\nalpha\nbeta slots=2\n"))) == (Host("alpha"), Host("beta", 2))


def test_no_shell_sees_it(tmp_path: Path) -> None:
    made = tmp_path / "made"
    with pytest.raises(ConfigError, match="a host must"):
        ask(Discovery(read_command(f"echo alpha ; touch {made}")))
    assert not made.exists()
    assert read_command("./ask --in 'a b'") == (os.path.abspath("ask"), "--in", "a b")
    assert read_command("ask") == ("ask",)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo alpha; echo >&2; echo no entry >&2; exit 3", r"but ended with exit code 3: no entry$"),
        ("kill -9 $$", r"but ended with exit code 137$"),
        ("exit 0", r"names no host"),
        ("echo 'alpha;reboot'", r":1: a host must be a name or an address, but is 'alpha;reboot' instead"),
        ("echo alpha; echo '-oProxyCommand=x'", r":2: a host must be"),
        ("printf 'al\\377pha\\n'", r":1: a host must be"),
        ("echo alpha:0", r":1: slots must be a number from 1 to 4096, but 'alpha:0' has '0'"),
        ("echo alpha:-2", r":1: slots must be a number from 1 to 4096, but 'alpha:-2' has '-2'"),
        ("echo alpha:many", r"but 'alpha:many' has 'many'"),
        ("echo alpha:1000000000", r"but 'alpha:1000000000' has '1000000000'"),
        ("printf 'alpha:%05000d' 1", r"but 'alpha:0{74}' has '0{80}'$"),
        (
            "echo alpha; echo beta:2; echo beta:3",
            r":3: beta is named a second time, with another number of slots \(3, before 2\); name it once",
        ),
        ("head -c 1048577 /dev/zero", r"but printed 1048576 bytes and more"),
        ("yes alpha", r"but printed 1048576 bytes and more"),
        ("yes no entry >&2", r"but printed 1048576 bytes and more"),
    ],
)
def test_what_is_no_answer_is_refused(script: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ask(Discovery(("sh", "-c", script)))


@pytest.mark.usefixtures("files")
def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--host-discovery /no/such cannot be started: No such file or directory"):
        Discovery(("/no/such",)).begin(0.0)


@pytest.mark.usefixtures("files")
def test_a_command_that_hangs_is_ended_with_all_that_it_started() -> None:
    discovery = Discovery(("sh", "-c", "sleep 600 & echo alpha; sleep 600"), deadline_s=1.0)
    discovery.begin(time.monotonic())
    (pid,) = discovery.pids
    while len(started := psutil.Process(pid).children()) < 2:
        time.sleep(0.002)
    assert discovery.poll(time.monotonic()) is None
    with pytest.raises(ConfigError, match="but did not end within 1 s"):
        discovery.poll(time.monotonic() + 1.0)
    assert not psutil.wait_procs(started, 10.0)[1]
    discovery.stop()


def test_a_command_that_is_not_waited_for_is_ended() -> None:
    discovery = Discovery(("sleep", "600"))
    discovery.begin(time.monotonic())
    (pid,) = discovery.pids
    discovery.stop()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("text", ["", "  ", "a 'b"])
def test_what_is_no_command_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--host-discovery must be a command"):
        read_command(text)
