"""A download that goes on where it broke off, within one command and from one command to the next. Standard library only."""

import http.client
import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Final

from hora import __version__, log

_BLOCK_BYTES: Final = 1 << 18
_ATTEMPTS: Final = 5
_SOCKET_TIMEOUT_S: Final = 30.0


class Unreachable(Exception):
    """The archive cannot be had from where it should be."""


class Archive:
    """An archive on its way from `url` to `path`; what has come is kept, with the mark by which the host tells whether it still fits."""

    def __init__(self, url: str, path: Path) -> None:
        self.url = url
        self.path = path
        self._mark_path = path.with_name(path.name + ".json")

    def download(self) -> None:
        """Brings the archive, in as many pieces as the connection breaks it into.

        Raises:
            Unreachable: the host cannot be reached, refuses, or breaks off again and again; what has come stays for the next try.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._bring_rest()
            except urllib.error.HTTPError as error:
                error.close()
                if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                    raise Unreachable(f"the host answered {error.code} {error.reason}") from error
                self.discard()
            except urllib.error.URLError as error:
                raise Unreachable(str(error.reason)) from error
            except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
                log.get_logger().info("the connection broke (%s); going on, attempt %d of %d", error, attempt, _ATTEMPTS)
        raise Unreachable(f"the connection broke {_ATTEMPTS} times; {self._have()} bytes are kept, run the command again to go on")

    def discard(self) -> None:
        """Removes what has come."""
        self.path.unlink(missing_ok=True)
        self._mark_path.unlink(missing_ok=True)

    def _have(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def _bring_rest(self) -> None:
        have, mark = self._have(), self._mark()
        # Some hosts refuse the name that urllib gives itself.
        request = urllib.request.Request(self.url, headers={"User-Agent": f"hora/{__version__}"})
        if have and mark:
            request.add_header("Range", f"bytes={have}-")
            request.add_header("If-Range", mark)
        with urllib.request.urlopen(request, timeout=_SOCKET_TIMEOUT_S) as response:
            goes_on = response.status == http.client.PARTIAL_CONTENT
            self._remember(response.headers.get("ETag") or response.headers.get("Last-Modified"))
            log.get_logger().info("fetching %s%s", self.url, f" from byte {have} on" if goes_on else "")
            with self.path.open("ab" if goes_on else "wb") as file:
                _copy(response, file)

    def _mark(self) -> str | None:
        try:
            fields = json.loads(self._mark_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return fields["mark"] if fields.get("url") == self.url else None

    def _remember(self, mark: str | None) -> None:
        # A weak ETag may not be used to go on with a part (RFC 9110, 13.1.5).
        strong = None if mark is None or mark.startswith("W/") else mark
        self._mark_path.write_text(json.dumps({"url": self.url, "mark": strong}), encoding="utf-8")


def _copy(response: http.client.HTTPResponse, file: IO[bytes]) -> None:
    expected = response.length
    came = 0
    while block := response.read(_BLOCK_BYTES):
        file.write(block)
        came += len(block)
    if expected is not None and came < expected:
        raise http.client.IncompleteRead(b"", expected - came)
