import os
import subprocess
import sys
from pathlib import Path

import pytest

from hora.comm import owner
from hora.comm.owner import Owner, is_gone


def test_a_living_process_is_not_gone():
    assert is_gone(Owner.current().token) is False


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="needs /proc")
def test_a_process_may_have_any_name():
    """Such as one that was cut after 15 bytes, in the middle of a letter."""
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    comm.write_bytes("träning träning".encode()[:10] + b"\xc3")
    try:
        assert is_gone(Owner.current().token) is False
    finally:
        comm.write_bytes(before)


def test_an_ended_process_is_gone():
    command = [sys.executable, "-c", "from hora.comm.owner import Owner; print(Owner.current().token)"]
    token = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert is_gone(token) is True


def test_a_process_of_which_only_the_exit_status_is_left_is_gone():
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert owner._started(child.pid) is None


def test_a_later_process_with_the_same_number_is_another():
    mine = Owner.current()
    assert is_gone(Owner(mine.host, mine.machine, mine.pid, mine.started - 1).token) is True


@pytest.mark.parametrize("token", ["", "x", "00000000-1-1", "00000000-1", f"{Owner.current().machine}-x-1"])
def test_other_machines_and_other_words_are_not_judged(token):
    assert is_gone(token) is None


def test_a_token_is_a_plain_word():
    assert Owner.current().token.replace("-", "").isalnum()


def test_without_proc_psutil_tells(monkeypatch):
    monkeypatch.setattr(owner, "_started", owner._started_by_psutil)
    mine = Owner.current()
    assert is_gone(mine.token) is False
    assert is_gone(Owner(mine.host, mine.machine, mine.pid, mine.started - 1).token) is True
    assert is_gone(Owner(mine.host, mine.machine, 2**22 + 1, mine.started).token) is True
