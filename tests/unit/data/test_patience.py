"""Waiting for a process that will not answer has an end."""

import multiprocessing
import os
import signal

import pytest

from hora.data.patience import Patience


def _stop(pipe: multiprocessing.connection.Connection) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    pipe.send("never")


def test_a_stopped_process_is_given_up_while_this_one_waits_in_its_pipe() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_stop, args=(there,))
    process.start()
    there.close()
    with Patience(0.2, process.kill) as patience:
        with pytest.raises(EOFError), patience.waiting():
            here.recv()
        assert patience.lost
    process.join(10)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("timeout_s", [0.0, 30.0])
def test_nobody_is_given_up_who_answers(timeout_s: float) -> None:
    given_up: list[int] = []
    with Patience(timeout_s, lambda: given_up.append(1)) as patience:
        for _ in range(3):
            with patience.waiting():
                pass
    assert (given_up, patience.lost) == ([], False)
