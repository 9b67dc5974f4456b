"""Downloads that break off, lie, or happen twice at once, against a server of our own on the loopback interface."""

import hashlib
import io
import json
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO

import pytest

from hora import env
from hora.errors import ConfigError
from hora.recipes import fetch as fetching
from hora.recipes.fetch import DATASETS, Dataset, Member, cache_directory, fetch

TEXTS = {"train.txt": b"the training text\n" * 5000, "valid.txt": b"valid\n", "test.txt": b"test\n"}


def packed(texts: dict[str, bytes], prefix: str = "folder/") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        for name, text in texts.items():
            zipped.writestr(prefix + name, text)
    return buffer.getvalue()


@dataclass
class Host:
    """What the server does: which bytes it has, where it breaks off (once each), what it refuses; and what it was asked."""

    body: bytes
    etag: str | None = '"one"'
    breaks: list[int] = field(default_factory=list)
    status: int = 200
    knows_ranges: bool = True
    ranges: list[str | None] = field(default_factory=list)
    agents: list[str | None] = field(default_factory=list)
    url: str = ""
    hold: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.hold.set()


def handler_of(host: Host) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host.ranges.append(self.headers.get("Range"))
            host.agents.append(self.headers.get("User-Agent"))
            host.asked.set()
            host.hold.wait(20)
            if host.status != 200:
                self.send_error(host.status)
                return
            start = self._start()
            if start > len(host.body):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(host.body) - start))
            if host.etag:
                self.send_header("ETag", host.etag)
            self.end_headers()
            end = host.breaks.pop(0) if host.breaks else len(host.body)
            self.wfile.write(host.body[start:end])

        def _start(self) -> int:
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            fits = host.knows_ranges and self.headers.get("If-Range", host.etag) == host.etag
            return int(asked[1]) if asked and fits else 0

        def log_message(self, *args: object) -> None:
            pass

    return Handler


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host(packed(TEXTS))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_of(host)) as server:
        server.daemon_threads = False  # so that closing waits for them
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        host.url = f"http://127.0.0.1:{server.server_port}/texts.zip"
        yield host
        host.hold.set()
        server.shutdown()
        thread.join()


def dataset_at(host: Host) -> Dataset:
    members = {name: Member(f"folder/{name}", len(text), hashlib.sha256(text).hexdigest()) for name, text in TEXTS.items()}
    return Dataset("texts", "Texts of the test", host.url, members)


def assert_whole(directory: Path) -> None:
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == TEXTS


def leftovers(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {".texts.lock", "texts"}


def test_files_appear_whole_and_nothing_is_left_beside_them(host: Host, tmp_path: Path) -> None:
    assert_whole(fetch(dataset_at(host), tmp_path / "cache"))
    assert leftovers(tmp_path / "cache") == set()
    assert host.agents[0] is not None
    assert host.agents[0].startswith("hora/")


def test_what_is_there_is_not_fetched_again(host: Host, tmp_path: Path) -> None:
    fetch(dataset_at(host), tmp_path)
    assert fetch(dataset_at(host), tmp_path) == tmp_path / "texts"
    assert len(host.ranges) == 1


def test_broken_connection_goes_on_where_it_broke(host: Host, tmp_path: Path) -> None:
    host.breaks = [1000, 5000]
    assert_whole(fetch(dataset_at(host), tmp_path))
    assert host.ranges == [None, "bytes=1000-", "bytes=5000-"]


def test_download_given_up_is_gone_on_with_by_the_next_command(host: Host, tmp_path: Path) -> None:
    host.breaks = [100, 200, 300, 400, 500]
    with pytest.raises(ConfigError, match="broke 5 times; 500 bytes are kept"):
        fetch(dataset_at(host), tmp_path)
    assert_whole(fetch(dataset_at(host), tmp_path))
    assert host.ranges[-1] == "bytes=500-"


def test_archive_changed_in_between_is_fetched_from_its_start(host: Host, tmp_path: Path) -> None:
    host.breaks = [1000] * 5
    with pytest.raises(ConfigError):
        fetch(dataset_at(host), tmp_path)
    host.etag, host.body = '"two"', packed({"another": b"file before the others"} | TEXTS)
    assert_whole(fetch(dataset_at(host), tmp_path))


@pytest.mark.parametrize(("etag", "knows_ranges"), [(None, True), ('W/"weak"', True), ('"one"', False)])
def test_host_that_cannot_go_on_is_asked_for_the_whole(host: Host, tmp_path: Path, etag: str | None, knows_ranges: bool) -> None:
    host.etag, host.knows_ranges, host.breaks = etag, knows_ranges, [1000]
    assert_whole(fetch(dataset_at(host), tmp_path))
    assert host.ranges == [None, "bytes=1000-" if etag == '"one"' else None]


def leave_part(host: Host, cache: Path, text: bytes) -> None:
    (cache / ".texts.part").write_bytes(text)
    (cache / ".texts.part.json").write_text(json.dumps({"url": host.url, "mark": host.etag}))


def test_part_longer_than_the_archive_is_begun_anew(host: Host, tmp_path: Path) -> None:
    leave_part(host, tmp_path, host.body + b"x")
    assert_whole(fetch(dataset_at(host), tmp_path))
    assert host.ranges == [f"bytes={len(host.body) + 1}-", None]


def test_part_that_was_damaged_is_refused_once(host: Host, tmp_path: Path) -> None:
    leave_part(host, tmp_path, b"x" * 10)
    with pytest.raises(ConfigError, match="not the one expected and was removed"):
        fetch(dataset_at(host), tmp_path)
    assert_whole(fetch(dataset_at(host), tmp_path))


def test_other_text_is_refused_and_removed(host: Host, tmp_path: Path) -> None:
    host.body = packed(TEXTS | {"valid.txt": b"forged"})
    with pytest.raises(ConfigError, match=r"valid\.txt has SHA-256 [0-9a-f]{64}, but [0-9a-f]{64} was expected"):
        fetch(dataset_at(host), tmp_path)
    assert leftovers(tmp_path) == set()
    assert not (tmp_path / "texts").exists()


def test_member_that_swells_is_cut_at_its_known_size(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host.body = packed(TEXTS | {"test.txt": bytes(10_000_000)})
    written: list[int] = []
    extract = fetching._extract

    def spy(zipped: zipfile.ZipFile, member: Member, path: Path) -> None:
        try:
            extract(zipped, member, path)
        finally:
            written.append(path.stat().st_size)

    monkeypatch.setattr(fetching, "_extract", spy)
    with pytest.raises(ConfigError, match=r"test\.txt has SHA-256"):
        fetch(dataset_at(host), tmp_path)
    assert max(written) <= max(len(text) for text in TEXTS.values()) + 1


@pytest.mark.parametrize("prefix", ["../", "/", "elsewhere/"])
def test_members_at_other_places_are_refused_and_not_written(host: Host, tmp_path: Path, prefix: str) -> None:
    host.body = packed(TEXTS, prefix)
    with pytest.raises(ConfigError, match=r"it has no folder/train\.txt"):
        fetch(dataset_at(host), tmp_path / "cache")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert leftovers(tmp_path / "cache") == set()


@pytest.mark.parametrize("body", [b"<html>not found</html>", packed(TEXTS)[:-30]])
def test_page_or_torso_in_place_of_an_archive_is_refused(host: Host, tmp_path: Path, body: bytes) -> None:
    host.body = body
    with pytest.raises(ConfigError, match="not the one expected and was removed"):
        fetch(dataset_at(host), tmp_path)


@pytest.mark.parametrize("status", [403, 404, 500])
def test_refusal_of_the_host_is_reported_with_what_to_do(host: Host, tmp_path: Path, status: int) -> None:
    host.status = status
    with pytest.raises(ConfigError, match=f"the host answered {status}") as caught:
        fetch(dataset_at(host), tmp_path)
    for part in (str(tmp_path / "texts"), "folder/train.txt", env.DATA_URL, "--data"):
        assert part in str(caught.value)


def test_no_network_is_reported_with_what_to_do(tmp_path: Path) -> None:
    nobody = replace(DATASETS["wikitext-2"], url="http://127.0.0.1:9/wikitext-2-v1.zip")
    with pytest.raises(ConfigError, match=r"could not be fetched from http://127\.0\.0\.1:9.*put train\.txt"):
        fetch(nobody, tmp_path)


def test_another_host_can_be_named(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.DATA_URL, host.url.removesuffix("texts.zip"))
    assert_whole(fetch(replace(dataset_at(host), url="http://127.0.0.1:9/texts.zip"), tmp_path))


def test_other_schemes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.DATA_URL, "file:///etc")
    with pytest.raises(ConfigError, match="must begin with http"):
        fetch(DATASETS["wikitext-2"], tmp_path)


def test_users_own_files_at_the_place_are_neither_used_nor_removed(host: Host, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"train\.txt must be that of Texts of the test"):
        fetch(dataset_at(host), tmp_path)
    assert (tmp_path / "texts" / "train.txt").read_text() == "mine"


def test_cache_that_cannot_be_made_is_reported(host: Host, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="must be writable, but: Not a directory; set XDG_CACHE_HOME"):
        fetch(dataset_at(host), tmp_path / "file" / "cache")


def test_full_disk_is_reported(host: Host, tmp_path: Path) -> None:
    (tmp_path / ".texts.part").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="must be writable, but: No space left on device"):
        fetch(dataset_at(host), tmp_path)


@contextmanager
def other_process_fetching(host: Host, cache: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process in the midst of fetching the same data set, held by the host until `host.hold` is set."""
    host.hold.clear()
    script = f"from pathlib import Path; from hora.recipes.fetch import *; fetch({dataset_at(host)!r}, Path({str(cache)!r}))"
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        try:
            assert host.asked.wait(30)
            yield process
        finally:
            process.kill()


def when_the_lock_is_met(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Calls `act` when this process first finds the lock taken."""
    try_lock, acted = fetching._try_lock, threading.Event()

    def spy(file: IO[bytes]) -> bool:
        taken = try_lock(file)
        if not taken and not acted.is_set():
            acted.set()
            act()
        return taken

    monkeypatch.setattr(fetching, "_try_lock", spy)


def test_of_two_processes_one_fetches_and_the_other_waits(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with other_process_fetching(host, tmp_path) as other:
        when_the_lock_is_met(monkeypatch, lambda: host.hold.set())
        assert_whole(fetch(dataset_at(host), tmp_path))
        assert other.wait(30) == 0
    assert len(host.ranges) == 1


def test_killed_process_holds_nobody_up(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with other_process_fetching(host, tmp_path) as other:
        when_the_lock_is_met(monkeypatch, lambda: (other.kill(), host.hold.set()))
        assert_whole(fetch(dataset_at(host), tmp_path))
    assert len(host.ranges) == 2


def test_lock_that_is_never_given_back_ends_at_its_deadline(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_LOCK_TIMEOUT_S", 0.2)
    with other_process_fetching(host, tmp_path), pytest.raises(ConfigError, match="another process has held"):
        fetch(dataset_at(host), tmp_path)


def test_cache_is_where_the_environment_says(tmp_path: Path) -> None:
    assert cache_directory({"XDG_CACHE_HOME": "/elsewhere"}) == Path("/elsewhere/hora")
    assert cache_directory({}) == Path.home() / ".cache" / "hora"
