"""A save in the background that is killed or refused at any of its system calls.

The system calls are struck by strace, which counts those of each thread by itself. All are armed for call number `STRUCK`; a process for each of
them makes as many idle calls before, in the thread that writes, that the one in question has this number. So one start of strace strikes all.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_kit import look

from hora.train.checkpoint.manifest import CheckpointName
from hora.train.checkpoint.storage import Storage

STRUCK = 60
# No torch: it starts at once, and may be forked. One checkpoint is there; the next is written in the background and the first one removed.
SWEEP = f"""
import json, os, shutil, sys
from contextlib import suppress
from pathlib import Path
from hora.errors import CheckpointError
from hora.train.checkpoint.manifest import CheckpointName, Manifest
from hora.train.checkpoint.retention import Retention
from hora.train.checkpoint.storage import Storage
from hora.train.checkpoint.writer import Order, Writer

class File:
    def __init__(self, name, *chunks):
        self.name, self.size_bytes, self._chunks = name, sum(map(len, chunks)), chunks
    def chunks(self):
        yield from self._chunks

def order(step, ready):
    files = [File("model.safetensors", b"header", bytes([step]) * 100_000), File("model.json", b"%d" % step)]
    return Order(Manifest(1, "0", "0", step, 0, 0, 1, 1, None, "a machine", None, "", {{}}), files, ready=ready)

root = os.open("/", os.O_RDONLY)
IDLE = {{
    "mkdir": lambda: os.mkdir("/"), "write": lambda: os.write(999_999, b""), "fsync": lambda: os.fsync(999_999), "rename": lambda: os.rename("", ""),
    "unlinkat": lambda: os.unlink("", dir_fd=root), "rmdir": lambda: os.rmdir(""),
}}

def save(directory, call, nth):
    def idle():
        for _ in range({STRUCK} - nth):
            with suppress(OSError):
                IDLE[call]()
    shutil.copytree(sys.argv[1], directory)
    writer = Writer(Storage(directory), Retention(keep_last=1, keep_best=0))
    writer.begin(order(2, idle))
    try:
        writer.wait()
    except CheckpointError as error:
        assert "step 2 was to be saved in the background" in str(error), error
        return 3
    return 0

def struck(call, nth):
    child = os.fork()
    if not child:
        code = 1
        try:
            code = save(Path(sys.argv[2], f"{{call}}-{{nth}}"), call, nth)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

calls = json.loads(sys.argv[3])
ended = {{}}
for call, total in calls.items():
    # Without a number of calls: until one is not struck.
    codes = ended[call] = []
    while not codes or (codes[-1] == -9 if total is None else len(codes) < total):
        codes.append(struck(call, len(codes) + 1))
print(json.dumps(ended))
"""
KILLED = ("mkdir", "write", "fsync", "rename", "unlinkat", "rmdir")
REFUSED = ("write", "fsync", "rename")
OLD, NEW = CheckpointName(0, 1), CheckpointName(0, 2)


def _strace_works() -> bool:
    command = ["strace", "-f", "-qq", "-e", "inject=sync:error=EIO", "-o", "/dev/null", "true"]
    return shutil.which("strace") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not _strace_works(), reason="strace is not installed or may not trace here")


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from hora.train.checkpoint.manifest import Manifest

    storage = Storage(tmp_path_factory.mktemp("saved") / "checkpoints")
    with storage.write(OLD) as draft:
        draft.add("model.safetensors", [b"header"])
        draft.add("model.json", [b"1"])
        storage.commit(draft, Manifest(1, "0", "0", 1, 0, 0, 1, 1, None, "a machine", None, "", draft.files))
    return storage.path


def _sweep(saved_once: Path, directory: Path, calls: dict[str, int | None], how: str) -> dict[str, list[int]]:
    """How each process ended that was struck at the nth of its calls."""
    strikes = [word for call in calls for word in ("-e", f"inject={call}:{how}:when={STRUCK}")]
    tracer = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", "/dev/null", *strikes]
    command = [*tracer, sys.executable, "-c", SWEEP, str(saved_once), str(directory), json.dumps(calls)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def killed(saved_once: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    directory = tmp_path_factory.mktemp("killed")
    return directory, _sweep(saved_once, directory, dict.fromkeys(KILLED), "signal=SIGKILL")


@pytest.mark.parametrize("call", KILLED)
def test_a_save_in_the_background_killed_at_any_call_leaves_the_old_or_the_new(killed, call):
    directory, ended = killed
    *struck, last = ended[call]
    assert last == 0, "the one after the last call is not struck"
    assert len(struck) >= {"mkdir": 1, "write": 4, "fsync": 5, "rename": 2, "unlinkat": 3, "rmdir": 1}[call], struck
    assert set(struck) == {-9}
    seen = []
    for nth in range(1, len(struck) + 1):
        storage = Storage(directory / f"{call}-{nth}")
        seen.append(look(storage.path))
        assert seen[-1] in ([OLD], [NEW], [OLD, NEW])
        storage.sweep()
        assert os.listdir(storage.path) == [str(name) for name in seen[-1]] or len(seen[-1]) == 2
    assert seen == sorted(seen, key=lambda names: names != [OLD]), "what is saved does not disappear again"
    assert look(directory / f"{call}-{len(ended[call])}") == [NEW]


def test_a_call_that_fails_in_the_background_is_told_and_leaves_the_old(saved_once, killed, tmp_path):
    counts = {call: len(killed[1][call]) - 1 for call in REFUSED}
    ended = _sweep(saved_once, tmp_path, counts, "error=EIO")
    for call, codes in ended.items():
        for nth, code in enumerate(codes, 1):
            names = look(tmp_path / f"{call}-{nth}")
            if code == 3:
                # After the rename only the last fsync can fail: the new one is there, but nobody is told that it is safe.
                assert names == ([OLD, NEW] if (call, nth) == ("fsync", counts["fsync"]) else [OLD])
            else:
                # The removal of the old one was left undone.
                assert (call, nth, code, names) == ("rename", 2, 0, [OLD, NEW])
            assert not [name for name in os.listdir(tmp_path / f"{call}-{nth}") if name.startswith(".tmp-")]
