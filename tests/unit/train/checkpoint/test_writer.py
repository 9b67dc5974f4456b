import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from hora.errors import CheckpointError
from hora.train.checkpoint.manifest import CheckpointName, Manifest
from hora.train.checkpoint.retention import Retention
from hora.train.checkpoint.storage import Storage
from hora.train.checkpoint.writer import Order, Writer


class File:
    name = "model.json"
    size_bytes = 4

    def chunks(self) -> Iterator[memoryview]:
        yield memoryview(b"true")


def _order(step: int, ready=lambda: None, files=None) -> Order:
    facts = Manifest(1, "0", "0", step, 0, 0, 1, 1, None, "a machine", None, "", {})
    return Order(facts, [File()] if files is None else files, ready=ready)


@pytest.fixture
def writer(tmp_path):
    return Writer(Storage(tmp_path), Retention(keep_last=1, keep_best=0))


def test_a_checkpoint_is_written_in_another_thread(writer, tmp_path):
    threads = []
    writer.begin(_order(1, lambda: threads.append(threading.current_thread())))
    writer.wait()
    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()
    assert writer.newest == CheckpointName(0, 1)
    assert Storage(tmp_path).names() == [CheckpointName(0, 1)]


def test_what_is_not_kept_goes_when_the_next_one_stands(writer, tmp_path):
    for step in (1, 2):
        writer.begin(_order(step))
        writer.wait()
    assert Storage(tmp_path).names() == [CheckpointName(0, 2)]


def test_an_error_is_told_once_and_names_the_step(writer, tmp_path):
    writer.begin(_order(7, ready=lambda: 1 // 0))
    with pytest.raises(
        CheckpointError, match=r"step 7 was to be saved in the background, but checkpoint .*step-00000007.g0 .*ZeroDivisionError"
    ):
        writer.wait()
    writer.wait()
    assert writer.newest is None
    assert list(tmp_path.iterdir()) == []


def test_the_process_does_not_end_before_the_thread(writer):
    go_on, daemons = threading.Event(), []
    writer.begin(_order(1, lambda: (daemons.append(threading.current_thread().daemon), go_on.wait(60))))
    go_on.set()
    writer.wait()
    assert daemons == [False]


def test_the_copies_are_given_back_when_they_are_written(writer):
    file = File()
    there = weakref.ref(file)
    order = _order(1, files=[file])
    writer.begin(order)
    del file, order
    for thread in threading.enumerate():
        if thread.name == "hora-checkpoint":
            thread.join()
    gc.collect()
    assert there() is None
    writer.wait()
