"""What scenarios inject happens, and what they look at is seen."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch

from hora.diag.chaos import clock, injuries, rights, saving, wires
from hora.diag.chaos.journal import Event
from hora.diag.chaos.save import save


def test_one_bit_of_one_weight_is_flipped_and_can_be_flipped_back() -> None:
    weights = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 6).view(2, 3))
    before = weights.detach().clone()
    injuries.flip(weights, 3)
    assert (weights != before).sum() == 1
    assert weights.view(-1)[0] != before.view(-1)[0]
    injuries.flip(weights, 3)
    assert torch.equal(weights, before)


@pytest.mark.skipif(bool(rights.to_shift_clocks()), reason=rights.to_shift_clocks())
def test_the_clock_of_the_day_is_shifted_and_the_other_is_not(tmp_path: Path) -> None:
    (tmp_path / "clock").write_text("-86400")
    code = "import datetime, time; print([time.time(), datetime.datetime.now().timestamp(), time.monotonic()])"
    environ = {**os.environ, "LD_PRELOAD": str(clock._library(tmp_path)), "HORA_CHAOS_CLOCK": str(tmp_path / "clock")}
    times = [
        json.loads(subprocess.run([sys.executable, "-I", "-S", "-c", code], env=env, capture_output=True, check=True, text=True).stdout)
        for env in (os.environ, environ)
    ]
    assert [round((shifted - plain) / 86400) for plain, shifted in zip(*times, strict=True)] == [-1, -1, 0]


REFUSED = [Event(1.0, "a", rank, "unsaved", {"done": 10, "said": "step-10 could not be written: File too large"}) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([], "no other, must be refused on both ranks, but refused were []"),
        (REFUSED[:1], "but refused were [(0, 10)]"),
        ([*REFUSED, Event(2.0, "a", 0, "unsaved", {"done": 15, "said": "File too large"})], "(0, 15)"),
    ],
)
def test_saves_that_are_refused_on_one_rank_or_too_often_are_seen(events: list[Event], problem: str) -> None:
    assert list(saving._told(REFUSED, "short write")) == []
    assert len(list(saving._told(REFUSED, "full disk"))) == 2
    assert problem in next(saving._told(events, "short write"))


def test_a_last_good_checkpoint_that_is_gone_or_damaged_is_seen(tmp_path: Path) -> None:
    save(tmp_path / "good", 5)
    assert list(saving._kept(tmp_path / "good")) == []
    (tmp_path / "good" / ".tmp-rest").mkdir()
    assert list(saving._kept(tmp_path / "good")) == ["left behind: .tmp-rest"]
    (tmp_path / "good" / "step-00000005.g0" / "model.json").write_text("6")
    assert "is damaged" in next(saving._kept(tmp_path / "good"))
    shutil.rmtree(tmp_path / "good" / "step-00000005.g0")
    assert "update 5 alone must be there" in next(saving._kept(tmp_path / "good"))


def test_a_file_is_written_no_further_than_its_limit_inside_of_the_fault(tmp_path: Path) -> None:
    code = "import sys\nfor line in sys.stdin:\n    try:\n        open(line.strip(), 'wb').write(bytes(10**6)); print('ok', flush=True)\n"
    code += "    except OSError as error:\n        print(error, flush=True)\n"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def write(name: str) -> str:
            print(tmp_path / name, file=child.stdin, flush=True)
            return child.stdout.readline().strip()  # type: ignore[union-attr]

        with saving._short(None, tmp_path, psutil.Process(child.pid)):  # type: ignore[arg-type]
            assert "File too large" in write("refused")
        assert write("mended") == "ok"
        child.stdin.close()


def test_a_door_that_says_too_much_is_heard() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as sock:
                sock.recv(100)
                sock.sendall(bytes(1000))

        thread = threading.Thread(target=answer)
        thread.start()
        assert len(wires._call(server.getsockname(), b"tell me", 5.0)) > wires._MOST_SAID
        thread.join()
