"""A save that is killed at any of its system calls, or that one of them refuses: the old checkpoint or the new one is there, whole.

The system calls are struck by strace. A killed process is not a lost power supply: that what is called saved survives that too is argued from
the order of the calls, which a test looks at.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_kit import look

from hora.train.checkpoint.manifest import CheckpointName

# One generation further than what is there, then the old one goes: every change of the disk that a save makes. No torch: it starts at once.
SAVE = """
import sys
from pathlib import Path
from hora.train.checkpoint.manifest import CheckpointName, Manifest
from hora.train.checkpoint.retention import Retention
from hora.train.checkpoint.storage import Storage

storage, step = Storage(Path(sys.argv[1])), int(sys.argv[2])
storage.sweep()
try:
    with storage.write(CheckpointName(0, step)) as draft:
        draft.add("model.safetensors", [b"header", bytes([step]) * 100_000])
        draft.add("model.json", [b"%d" % step])
        storage.commit(draft, Manifest(1, "0", "0", step, 0, 0, 1, 1, None, "a machine", None, "", draft.files))
except OSError as error:
    sys.exit(f"refused: {error}")
Retention(keep_last=1, keep_best=0).prune(storage)
print("saved", flush=True)
"""
CALLS = ("mkdir", "openat", "write", "fsync", "rename", "unlinkat", "rmdir")
OLD, NEW = CheckpointName(0, 1), CheckpointName(0, 2)


def _strace(*arguments: str) -> list[str]:
    return ["strace", "-f", "--seccomp-bpf", "-qq", *arguments]


def _strace_works() -> bool:
    command = _strace("-e", "inject=sync:error=EIO", "-o", "/dev/null", "true")
    return shutil.which("strace") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not _strace_works(), reason="strace is not installed or may not trace here")


def _save(directory: Path, step: int, *tracer: str) -> subprocess.CompletedProcess[str]:
    command = [*tracer, sys.executable, "-c", SAVE, str(directory), str(step)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    assert _save(directory, 1).stdout == "saved\n"
    return directory


@pytest.fixture(scope="module")
def calls_of_a_save(saved_once, tmp_path_factory) -> list[str]:
    """The system calls of one save in order, from the first that changes the directory."""
    directory, log = tmp_path_factory.mktemp("traced") / "checkpoints", tmp_path_factory.mktemp("log") / "calls"
    shutil.copytree(saved_once, directory)
    assert _save(directory, 2, *_strace("-y", "-e", f"trace={','.join(CALLS)}", "-o", str(log))).stdout == "saved\n"
    lines = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines()]
    return [line.replace(str(directory), "DIR") for line in lines if str(directory) in line or "saved" in line]


def _number_of(calls: list[str], call: str) -> int:
    return sum(line.startswith(f"{call}(") for line in calls)


@pytest.mark.slow
@pytest.mark.parametrize("call", [call for call in CALLS if call != "openat"])
def test_a_save_killed_at_any_call_leaves_the_old_or_the_new(saved_once, calls_of_a_save, tmp_path, call):
    total = _number_of(calls_of_a_save, call)
    assert total >= 1
    seen = []
    for nth in range(1, total + 1):
        directory = tmp_path / str(nth)
        shutil.copytree(saved_once, directory)
        done = _save(directory, 2, *_strace("-o", "/dev/null", "-e", f"inject={call}:signal=SIGKILL:when={nth}"))
        assert done.returncode in (-9, 137), f"{call} #{nth} was not struck: {done}"
        seen.append(look(directory))
        assert seen[-1] in ([OLD], [NEW], [OLD, NEW])
        # The next start finds its way and leaves nothing of what was broken.
        assert _save(directory, 3).stdout == "saved\n"
        assert os.listdir(directory) == ["step-00000003.g0"]
    assert seen == sorted(seen, key=lambda names: names != [OLD]), "what is saved does not disappear again"


@pytest.mark.slow
@pytest.mark.parametrize(("call", "error"), [("write", "ENOSPC"), ("fsync", "EIO"), ("rename", "EIO"), ("mkdir", "ENOSPC")])
def test_a_save_that_a_call_refuses_leaves_the_old_or_the_new(saved_once, calls_of_a_save, tmp_path, call, error):
    total = _number_of(calls_of_a_save, call)
    for nth in range(1, total + 1):
        directory = tmp_path / str(nth)
        shutil.copytree(saved_once, directory)
        done = _save(directory, 2, *_strace("-o", "/dev/null", "-e", f"inject={call}:error={error}:when={nth}"))
        names = look(directory)
        if "refused" in done.stderr:
            # After the rename only the last fsync can fail: the new one is there, but nobody is told that it is safe.
            assert names == ([OLD, NEW] if (call, nth) == ("fsync", total) else [OLD])
        else:
            # Only the removal of the old one, or of the message about the new one, was left undone.
            assert NEW in names
        assert not [name for name in os.listdir(directory) if name.startswith(".tmp-")]


def test_everything_is_on_the_disk_before_it_is_called_saved(calls_of_a_save):
    order = [re.sub(r"-\w{8}-\d+-\d+", "", line) for line in calls_of_a_save]
    draft = "DIR/.tmp-step-00000002.g0"

    def position(pattern: str) -> int:
        found = [index for index, line in enumerate(order) if re.search(pattern, line)]
        assert found, f"{pattern} is not in {order}"
        return found[-1]

    files = ("model.safetensors", "model.json", "manifest.json")
    assert all(position(rf"^write\(\d+<{draft}/{file}>") < position(rf"^fsync\(\d+<{draft}/{file}>") for file in files)
    steps = [
        max(position(rf"^fsync\(\d+<{draft}/{file}>") for file in files[:2]),
        position(rf"^openat\(.*{draft}/manifest.json"),
        position(rf"^fsync\(\d+<{draft}/manifest.json>"),
        position(rf"^fsync\(\d+<{draft}>"),
        position(rf'^rename\("{draft}", "DIR/step-00000002.g0"\)'),
        position(r"^fsync\(\d+<DIR>"),
        position(r'^rename\("DIR/step-00000001.g0", "DIR/.trash-'),
        position("saved"),
    ]
    assert steps == sorted(steps)
