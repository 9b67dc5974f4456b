"""`hora.run` with real ranks."""

import io
import re
import sys
import threading

import called
import pytest
import torch

import hora
from hora.calls import call, functions, rank
from hora.calls.files import write_object
from hora.calls.request import Failure, Request, arguments_path
from hora.errors import ConfigError, LaunchError, RankFailed


@pytest.fixture(autouse=True)
def state(monkeypatch, tmp_path):
    monkeypatch.setenv("HORA_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("hora-")] == []


def test_results_come_back_by_rank(capsys):
    value = {"where": torch.tensor([1.5, -2.0]), "name": "ä"}
    first, second = hora.run(called.everything, [value], {"scale": 3}, num_ranks=2, timeout_s=100)
    for number, result in enumerate((first, second)):
        assert result["rank"] == number
        assert torch.equal(result["total"], torch.full((2,), 2.0))
        assert torch.equal(result["value"]["where"], value["where"])
        assert isinstance(result["scaled"], called.Point)
        assert torch.equal(result["scaled"].where, torch.tensor([4.5, -6.0]))
        assert result[3] == (None, b"\xff")
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["[0] hello from 0", "[1] hello from 1"]
    assert sorted(shown.err.splitlines()) == ["[0] beware", "[1] beware"]


def test_an_exception_names_rank_and_traceback(capsys):
    with pytest.raises(RankFailed, match=r"called\.fail_on_one failed on rank 1: ValueError: no such number") as caught:
        hora.run(called.fail_on_one, num_ranks=2, timeout_s=100)
    assert caught.value.rank == 1
    assert caught.value.trace.splitlines()[-1] == "ValueError: no such number"
    assert "in fail_on_one" in caught.value.trace
    assert "hora: rank 1" not in capsys.readouterr().err


def test_a_rank_that_dies_is_named_with_its_signal(tmp_path):
    error = call._explain(tmp_path, "called.die", "hora: rank 3 failed on here (process 7): killed by SIGKILL\n  its last words", 137)
    assert isinstance(error, RankFailed)
    assert (error.rank, error.trace) == (3, "")
    assert str(error) == "rank 3 ended before called.die returned: rank 3 failed on here (process 7): killed by SIGKILL\n  its last words"


class Broken(io.StringIO):
    def write(self, text):
        raise RuntimeError(f"nobody shows {text!r}")


@pytest.mark.parametrize("target", [None, Broken()])
def test_what_cannot_be_shown_is_read_all_the_same(tmp_path, target):
    """Ranks whose output nobody reads would wait for it in the end."""
    (tmp_path / "said").write_bytes(b"hello\n" * 3 + b"hora: rank 0 failed on here\nits log\n")
    shown = call._Shown((tmp_path / "said").open("rb"), target, until=call._REPORT)
    shown.finish()
    assert shown.kept == b"hora: rank 0 failed on here\nits log\n"


def test_a_rank_that_ends_well_without_a_result_is_named(monkeypatch):
    monkeypatch.setattr(call, "_call", lambda *_: None)
    with pytest.raises(RankFailed, match=r"called\.leave must return, but ended the process of rank 0 with exit code 0") as caught:
        hora.run(called.leave, num_ranks=2)
    assert caught.value.rank == 0


def test_a_job_that_ended_otherwise_is_told_with_its_exit_code(tmp_path):
    assert "the job ended with exit code 130" in str(call._explain(tmp_path, "called.die", "", 130))


def test_a_result_that_cannot_travel_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "path", list(sys.path))
    Request(functions.describe(called.return_what_cannot_travel), sys.path).write(tmp_path)
    write_object(arguments_path(tmp_path), {"args": (), "kwargs": {}}, "the arguments")
    assert rank.main(tmp_path) == 1
    failure = Failure.read(tmp_path, 0)
    assert failure is not None
    assert re.search(r"ConfigError: the result on rank 0\.made must be None, bool.* but is builtins\.object instead", failure.summary)
    assert failure.trace in capsys.readouterr().err


def test_a_deadline_ends_the_ranks(tmp_path):
    with pytest.raises(LaunchError, match=r"called\.wait must return within 0\.5 s, but has not on rank 0, 1"):
        hora.run(called.wait, [str(tmp_path)], num_ranks=2, timeout_s=0.5)


@pytest.mark.parametrize(
    ("function", "args", "num_ranks", "message"),
    [
        (lambda: 1, [], 1, "a lambda has none"),
        (called.die, [threading.Lock()], 1, r"the arguments\.args\.0 must be None.* but is _thread\.lock instead"),
        (called.die, [], 0, "num_ranks must be at least 1, but is 0 instead"),
    ],
)
def test_what_cannot_travel_is_refused_before_anything_starts(function, args, num_ranks, message):
    with pytest.raises(ConfigError, match=message):
        hora.run(function, args, num_ranks=num_ranks)
