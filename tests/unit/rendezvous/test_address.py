import os
import socket
import stat
from pathlib import Path

import pytest

from hora import env
from hora.errors import ConfigError, LaunchError
from hora.rendezvous.address import TcpAddress, UnixAddress, local_address, parse_address


@pytest.fixture
def private(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.mark.parametrize("text", ["unix:///run/job/rendezvous.sock", "tcp://10.0.0.1:29500", "tcp://[::1]:0", "tcp://node-1.cluster:80"])
def test_address_is_read_and_written_back(text: str) -> None:
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost:80",
        "tcp://localhost",
        "tcp://:80",
        "tcp://h:99999",
        "tcp://h:x",
        "unix://relative/path",
        "unix:",
        "http://h:80",
        "tcp://h:1/x",
    ],
)
def test_anything_else_is_refused_with_the_two_forms(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must read unix:///path or tcp://host:port, but is"):
        parse_address(text)


def test_one_node_meets_at_a_unix_socket(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.PORTABLE, raising=False)
    assert parse_address(local_address(private)) == UnixAddress(private / "rendezvous.sock")


def test_one_node_meets_at_loopback_where_only_portable_means_are_allowed(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.PORTABLE, "1")
    assert parse_address(local_address(private)) == TcpAddress("127.0.0.1", 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.7", "localhost"])
def test_tcp_listens_at_exactly_its_address(host: str) -> None:
    address = TcpAddress(host, 0)
    with address.listen() as listener:
        bound = address.bound(listener)
        assert bound == TcpAddress(*listener.getsockname()[:2])
        assert bound.port != 0
        assert bound.host in (host, "127.0.0.1", "::1")


def test_taken_port_is_named(free_port: int) -> None:
    with (
        socket.create_server(("127.0.0.1", free_port)),
        pytest.raises(LaunchError, match=f"127.0.0.1:{free_port}.*in use; choose another port$"),
    ):
        TcpAddress("127.0.0.1", free_port).listen()


def test_address_of_another_machine_is_named() -> None:
    with pytest.raises(LaunchError, match=r"tcp://192\.0\.2\.1:0, but cannot: .*; name an address of this machine"):
        TcpAddress("192.0.2.1", 0).listen()


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_unix_socket_is_refused_in_a_directory_that_others_may_enter(private: Path, mode: int) -> None:
    private.chmod(mode)
    address = UnixAddress(private / "s")
    with pytest.raises(LaunchError, match=f"with mode 0700, but .* mode {mode:04o} instead"):
        address.listen()
    with pytest.raises(LaunchError, match="name a private directory"):
        address.connect(1.0)
    assert os.listdir(private) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_unix_socket_is_refused_in_another_users_directory(private: Path) -> None:
    (private / "theirs").mkdir(0o700)
    os.chown(private / "theirs", 65534, 65534)
    with pytest.raises(LaunchError, match="but belongs to 65534"):
        UnixAddress(private / "theirs" / "s").listen()


def test_unix_socket_is_refused_in_a_directory_that_is_a_link(private: Path) -> None:
    (private / "real").mkdir(0o700)
    (private / "link").symlink_to(private / "real")
    with pytest.raises(LaunchError, match="cannot"):
        UnixAddress(private / "link" / "s").listen()
    assert os.listdir(private / "real") == []


@pytest.mark.parametrize("plant", ["file", "link", "dangling link", "directory"])
def test_whatever_is_at_the_path_already_is_left_alone(private: Path, plant: str) -> None:
    (private / "target").write_text("precious")
    path = private / "s"
    match plant:
        case "file":
            path.write_text("precious")
        case "link":
            path.symlink_to(private / "target")
        case "dangling link":
            path.symlink_to(private / "nowhere")
        case "directory":
            path.mkdir()
    before = path.lstat()
    with pytest.raises(LaunchError, match="name a path that is free"):
        UnixAddress(path).listen()
    assert path.lstat() == before
    assert (private / "target").read_text() == "precious"
    assert not (private / "nowhere").exists()


def test_a_socket_that_a_killed_process_has_left_makes_room(private: Path) -> None:
    path = private / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(path))
        dead.listen()
    with UnixAddress(path).listen() as listener, UnixAddress(path).connect(1.0), listener.accept()[0]:
        with pytest.raises(LaunchError, match="name a path that is free"):
            UnixAddress(path).listen()
        assert path.exists()


def test_unix_socket_works_at_a_path_longer_than_its_limit(private: Path) -> None:
    deep = private / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True, mode=0o700)
    address = UnixAddress(deep / "s")
    with address.listen() as listener, address.connect(1.0), listener.accept()[0]:
        assert stat.S_ISSOCK((deep / "s").stat().st_mode)
    address.remove()
    assert os.listdir(deep) == []
