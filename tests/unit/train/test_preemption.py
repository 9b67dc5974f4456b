import os
import signal
import subprocess
import threading

import pytest

from hora.errors import ConfigError
from hora.train.preemption import EXIT_CODE, Preemption


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_sets_the_flag_and_nothing_else(number):
    with Preemption() as preemption:
        assert not preemption.requested
        assert preemption.reason == ""
        signal.raise_signal(number)
        assert preemption.requested
        assert preemption.reason == number.name
    assert preemption.requested


def test_the_first_signal_is_the_reason():
    with Preemption() as preemption:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
    assert preemption.reason == "SIGUSR1"


def test_a_signal_that_came_before_a_run_began_is_known_in_it():
    with Preemption():  # of a process that is still to join its job
        signal.raise_signal(signal.SIGUSR1)
        with Preemption() as preemption:
            assert preemption.reason == "SIGUSR1"


def test_a_signal_from_another_process_arrives():
    with Preemption() as preemption:
        subprocess.run(["kill", "-TERM", str(os.getpid())], check=True)
        assert preemption.requested


def test_handlers_come_back_even_after_an_error():
    def mine(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGUSR1, mine)
    try:
        with pytest.raises(ZeroDivisionError), Preemption():
            assert signal.getsignal(signal.SIGUSR1) is not mine
            raise ZeroDivisionError
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_other_threads_are_refused():
    caught: list[BaseException] = []

    def enter() -> None:
        try:
            with Preemption():
                pass
        except ConfigError as error:
            caught.append(error)

    thread = threading.Thread(target=enter, name="loader")
    thread.start()
    thread.join(timeout=10)
    assert "must be noticed in the main thread, but this is thread 'loader'" in str(caught[0])


def test_the_exit_code_is_that_of_a_temporary_failure():
    assert EXIT_CODE == os.EX_TEMPFAIL
