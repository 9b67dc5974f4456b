"""The measured transfers of `hora doctor`, and who may not take part in them."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hora.diag.doctor import code, shared
from hora.diag.doctor.transfer import Listener, Sender, measure
from hora.rendezvous.key import new_key
from hora.rendezvous.protocol import CHALLENGE_BYTES, MAGIC, NONCE_BYTES, ProtocolError, WrongKeyError

KEY = new_key()


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    with Listener(request.param, KEY) as listening:
        yield request.param, listening.port


def test_bytes_arrive_and_are_counted_by_time(listener: tuple[str, int]) -> None:
    with Sender(*listener, KEY) as sender:
        assert all(sender.send(size_bytes) > 0 for size_bytes in (1, (1 << 18) + 1, 0, 1 << 20))
    assert measure(*listener, KEY, seconds=0.001) > 1e6


def test_another_key_is_refused_on_both_sides(listener: tuple[str, int]) -> None:
    with pytest.raises(WrongKeyError):
        Sender(*listener, new_key())
    with socket.create_connection(listener, 5) as stranger:
        stranger.sendall(MAGIC + bytes(NONCE_BYTES) + bytes(32) + b"\0" * 200)
        said = b""
        try:
            while piece := stranger.recv(4096):
                said += piece
        except ConnectionError:
            pass
    assert len(said) in (0, CHALLENGE_BYTES)


def test_it_listens_where_it_was_told_and_no_longer_than_needed() -> None:
    with Listener("127.0.0.1", KEY) as other:
        port = other.port
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1)


def test_whoever_hangs_up_is_no_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        threading.Thread(target=lambda: impostor.accept()[0].close()).start()
        with pytest.raises((ProtocolError, ConnectionError)):
            Sender("127.0.0.1", impostor.getsockname()[1], KEY)


def test_a_digest_is_of_names_and_texts_of_sources_alone(tmp_path: Path) -> None:
    (tmp_path / "package" / ".hidden").mkdir(parents=True)
    (tmp_path / "package" / "a.py").write_text("a = 1\n")
    first = code.digest_of(tmp_path)
    (tmp_path / "package" / ".hidden" / "b.py").write_text("")
    (tmp_path / "data.txt").write_text("x")
    assert code.digest_of(tmp_path) == first
    assert first.startswith("1 files, ")
    (tmp_path / "package" / "a.py").write_text("a = 2\n")
    changed = code.digest_of(tmp_path)
    (tmp_path / "package" / "a.py").rename(tmp_path / "package" / "c.py")
    assert len({first, changed, code.digest_of(tmp_path)}) == 3


def test_marks_are_read_and_removed_and_nothing_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "PATIENCE_S", 0.0)
    with shared.mark(tmp_path, "one", "text"):
        assert shared.read_marks(tmp_path, ["one", "two"]) == {"one": "text"}
    (tmp_path / "two").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError), shared.mark(tmp_path, "two", "text"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["two"]
