"""The doctor on another host, started there as the launcher starts its agents (`python -m hora.diag.doctor.agent`).

It is asked one thing after the other on standard input and answers each; when its input ends, it goes. It changes nothing, but for files with
names of their own in the shared directory, which it removes.
"""

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import hora
from hora.diag.doctor import code, report, shared
from hora.diag.doctor.transfer import Listener, Sender, measure
from hora.errors import LaunchError
from hora.launch.channel import Channel
from hora.launch.remote_agent import own_address, python_version, take_environment
from hora.launch.wire import from_text
from hora.rendezvous.protocol import ProtocolError

_PATIENCE_S = 600.0
_MEASURE_S = 0.2

Fields = Mapping[str, Any]


def main() -> int:
    """Answers until nobody asks any more; returns the exit code."""
    channel = Channel()
    with ExitStack() as release, suppress(LaunchError):
        while True:
            asked = channel.hear(_PATIENCE_S)
            try:
                channel.say(**_ANSWERS[asked["do"]](asked, release))
            except Exception as error:  # whatever it is, it is told where it is read
                channel.say(refused=f"{type(error).__name__}: {error}")
    return 0


def _look(asked: Fields, _: ExitStack) -> Fields:
    """What there is on this host."""
    take_environment(asked["environ"])
    shared_dir = None if asked["shared_dir"] is None else Path(from_text(asked["shared_dir"]))
    return {
        "findings": [asdict(finding) for finding in report.examine_host(shared_dir)],
        "hora": hora.__version__,
        "python": python_version(),
        "torch": metadata.version("torch"),
        "system": f"{platform.system()} {platform.machine()}",
        "code": code.digest_of_hora(),
        "directory": _digest_of(from_text(asked["directory"])),
        "names": {name: _resolve(name) for name in asked["names"]},
        "address": own_address(asked["interface"], asked["towards"]),
    }


def _digest_of(directory: str) -> str:
    return code.digest_of(Path(directory)) if os.path.isdir(directory) else "is not there"


def _resolve(name: str) -> list[str]:
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)})
    except (OSError, UnicodeError):
        return []


def _tell_time(_: Fields, __: ExitStack) -> Fields:
    return {"now": time.time()}


def _listen(asked: Fields, release: ExitStack) -> Fields:
    listener = release.enter_context(Listener(asked["address"], bytes.fromhex(asked["key"])))
    return {"port": listener.port}


def _reach(asked: Fields, _: ExitStack) -> Fields:
    """Which of the others answer from here: None, or why not."""
    return {"reached": {name: _try_to_reach(address, port, asked["key"]) for name, (address, port) in asked["others"].items()}}


def _try_to_reach(address: str, port: int, key: str) -> str | None:
    try:
        Sender(address, port, bytes.fromhex(key)).__exit__()
    except (OSError, ProtocolError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def _send(asked: Fields, _: ExitStack) -> Fields:
    return {"bytes_per_s": measure(asked["address"], asked["port"], bytes.fromhex(asked["key"]), _MEASURE_S)}


def _leave_mark(asked: Fields, release: ExitStack) -> Fields:
    release.enter_context(shared.mark(Path(from_text(asked["shared_dir"])), asked["name"], asked["text"]))
    return {}


def _read_marks(asked: Fields, _: ExitStack) -> Fields:
    return {"read": shared.read_marks(Path(from_text(asked["shared_dir"])), asked["names"])}


def _take_leave(_: Fields, release: ExitStack) -> Fields:
    release.close()
    return {}


_ANSWERS: dict[str, Callable[[Fields, ExitStack], Fields]] = {
    "look": _look,
    "tell time": _tell_time,
    "listen": _listen,
    "reach": _reach,
    "send": _send,
    "leave mark": _leave_mark,
    "read marks": _read_marks,
    "take leave": _take_leave,
}


if __name__ == "__main__":
    sys.exit(main())
