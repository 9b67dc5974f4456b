import errno
import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from hora import env
from hora.comm.owner import Owner
from hora.errors import ConfigError
from hora.train.lock import DirectoryLock


def test_the_lock_is_there_while_it_is_held(tmp_path):
    with DirectoryLock(tmp_path):
        assert json.loads((tmp_path / "lock").read_bytes())["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []


def test_a_second_holder_is_refused_and_told_of_the_first(tmp_path):
    with DirectoryLock(tmp_path):
        with pytest.raises(ConfigError, match=rf"only one job may work in .*, but process {os.getpid()} on .* does already"):
            DirectoryLock(tmp_path).acquire()
        assert (tmp_path / "lock").exists()


def test_a_disk_that_keeps_the_lock_hides_no_error(tmp_path, caplog, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.raises(ZeroDivisionError), DirectoryLock(tmp_path):
        monkeypatch.setattr(Path, "unlink", refuse)
        raise ZeroDivisionError
    assert f"the lock {tmp_path / 'lock'} could not be removed: [Errno 30] Read-only file system" in caplog.text


def test_the_lock_of_a_process_that_died_is_taken_over(tmp_path):
    code = "import os, pathlib, sys, hora.train.lock as lock; lock.DirectoryLock(pathlib.Path(sys.argv[1])).acquire(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code, tmp_path], check=False).returncode == 9
    with DirectoryLock(tmp_path):
        assert json.loads((tmp_path / "lock").read_bytes())["pid"] == os.getpid()


@pytest.mark.parametrize(
    "content",
    [b"", b"not json", b"[]", json.dumps({"host": "elsewhere", "pid": 1, "token": "00000000-1-1"}).encode()],
    ids=["empty", "garbage", "list", "other_machine"],
)
def test_a_holder_that_cannot_be_judged_counts_as_alive(tmp_path, content):
    (tmp_path / "lock").write_bytes(content)
    with pytest.raises(ConfigError, match=r"if that process is surely gone, remove .*lock"):
        DirectoryLock(tmp_path).acquire()
    assert (tmp_path / "lock").read_bytes() == content


HOLD = """
import pathlib, sys
from hora.comm import owner
from hora.train.lock import DirectoryLock

owner._machine = lambda: "00000000"  # before a reboot, or in a container before this one
DirectoryLock(pathlib.Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_the_lock_of_a_holder_on_this_host_that_has_been_started_anew_is_taken_over(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=rf"process {holder.pid} on .* does already"):
            DirectoryLock(tmp_path).acquire()
        holder.kill()
    told = json.loads((tmp_path / "lock").read_bytes())
    for spoilt in ({"host": "elsewhere"}, {"held": None}):
        (tmp_path / "lock").write_text(json.dumps(told | spoilt))
        with pytest.raises(ConfigError, match="only one job may work in"):
            DirectoryLock(tmp_path).acquire()
    (tmp_path / "lock").write_text(json.dumps(told))
    with DirectoryLock(tmp_path):
        assert json.loads((tmp_path / "lock").read_bytes())["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("token", "job", "generation", "taken"),
    [
        pytest.param("00000000-1-1", "mine", 1, True, id="on a host that is lost"),
        pytest.param("00000000-1-1", "mine", 2, False, id="of this generation"),
        pytest.param("00000000-1-1", "mine", None, False, id="of none"),
        pytest.param("00000000-1-1", "other", 1, False, id="of another job"),
        pytest.param(Owner.current().token, "mine", 1, False, id="here and alive"),
    ],
)
def test_the_lock_of_an_earlier_generation_elsewhere_is_taken_over(tmp_path, monkeypatch, token, job, generation, taken):
    monkeypatch.setenv(env.JOB_ID, "mine")
    monkeypatch.setenv(env.GENERATION, "2")
    content = json.dumps({"host": "elsewhere", "pid": 1, "token": token, "job": job, "generation": generation}).encode()
    (tmp_path / "lock").write_bytes(content)
    if not taken:
        with pytest.raises(ConfigError, match="only one job may work in"):
            DirectoryLock(tmp_path).acquire()
        return
    with DirectoryLock(tmp_path):
        told = json.loads((tmp_path / "lock").read_bytes())
        assert (told["pid"], told["job"], told["generation"]) == (os.getpid(), "mine", 2)
    monkeypatch.delenv(env.JOB_ID)
    (tmp_path / "lock").write_bytes(content.replace(b'"mine"', b"null"))
    with pytest.raises(ConfigError, match="only one job may work in"):
        DirectoryLock(tmp_path).acquire()


def test_release_leaves_the_lock_of_another_alone(tmp_path):
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    (tmp_path / "lock").write_bytes(b"another")
    lock.release()
    assert (tmp_path / "lock").read_bytes() == b"another"


FORK = """
import os, pathlib, sys
from hora.train.lock import DirectoryLock

lock = DirectoryLock(pathlib.Path(sys.argv[1]))
lock.acquire()
child = os.fork()
if child == 0:
    lock.release()
    os._exit(0)
os.waitpid(child, 0)
assert os.listdir(sys.argv[1]) == ["lock"]
lock.release()
assert os.listdir(sys.argv[1]) == []
"""


def test_a_fork_of_the_holder_does_not_release(tmp_path):
    subprocess.run([sys.executable, "-c", FORK, tmp_path], check=True)


def test_release_without_acquire_does_nothing(tmp_path):
    DirectoryLock(tmp_path / "absent").release()


def test_a_planted_link_is_not_written_through(tmp_path):
    mine = Owner.current()
    target = tmp_path / "target"
    target.write_bytes(json.dumps({"token": Owner(mine.host, mine.machine, mine.pid, mine.started - 1).token}).encode())
    before = target.read_bytes()
    (tmp_path / "lock").symlink_to(target)
    with DirectoryLock(tmp_path):
        pass
    assert target.read_bytes() == before


RACE = """
import sys
from itertools import chain
from pathlib import Path
from hora.errors import ConfigError
from hora.train.lock import DirectoryLock

print("ready", flush=True)
sys.stdin.readline()
for directory in sorted(Path(sys.argv[1]).iterdir()):
    try:
        DirectoryLock(directory).acquire()
        print(directory.name, flush=True)
    except ConfigError:
        pass
print("done", flush=True)
sys.stdin.readline()
"""


def test_of_many_jobs_that_start_at_once_one_takes_over_a_dead_ones_lock(tmp_path):
    mine = Owner.current()
    dead = json.dumps({"host": mine.host, "pid": mine.pid, "token": Owner(mine.host, mine.machine, mine.pid, mine.started - 1).token})
    names = [f"{number:03d}" for number in range(200)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_text(dead)
    pipe = subprocess.PIPE
    jobs = [subprocess.Popen([sys.executable, "-c", RACE, tmp_path], stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    try:
        for job in jobs:
            assert job.stdout.readline() == "ready\n"
        for job in jobs:
            job.stdin.write("go\n")
            job.stdin.flush()
        # Nobody ends before all have tried: the lock of one that has ended may be taken over.
        won = [list(iter(lambda job=job: job.stdout.readline().strip(), "done")) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
    assert sorted(chain.from_iterable(won)) == names
