import errno
import io
import json
import math
import os
import sys

import pytest

from hora.train.metrics import JsonLines, MetricsRow, MetricsWriter, TensorBoard, cut_metrics, open_tensorboard, read_metrics


def _write(path, *rows: MetricsRow) -> None:
    with MetricsWriter([JsonLines(path)]) as writer:
        for row in rows:
            writer.write(row)


def test_a_row_has_exactly_these_keys_in_this_order(tmp_path):
    _write(tmp_path / "m", MetricsRow(step=3, epoch=0, split="train", loss=1.5))
    (row,) = read_metrics(tmp_path / "m")
    assert list(row) == ["step", "epoch", "split", "loss", "perplexity", "tokens", "tokens_per_s", "lr", "bleu", "top1", "top5"]
    assert row["loss"] == 1.5
    assert row["lr"] is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_become_null(tmp_path, value):
    _write(tmp_path / "m", MetricsRow(step=1, epoch=0, split="train", loss=value))

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    assert json.loads((tmp_path / "m").read_text(), parse_constant=refuse)["loss"] is None


def test_every_row_is_written_at_once(tmp_path):
    writer = JsonLines(tmp_path / "m")
    for step in range(3):
        writer.write(MetricsRow(step=step, epoch=0, split="train"))
        assert [row["step"] for row in read_metrics(tmp_path / "m")] == list(range(step + 1))
    writer.close()


def test_rows_after_the_step_and_halves_of_rows_are_cut(tmp_path):
    path = tmp_path / "m"
    _write(path, *(MetricsRow(step=step, epoch=0, split=split) for step in range(4) for split in ("train", "valid")))
    with path.open("a") as file:
        file.write('{"step": 1, "ep')
    cut_metrics(path, 2)
    _write(path, MetricsRow(step=3, epoch=0, split="train"))
    assert [row["step"] for row in read_metrics(path)] == [0, 0, 1, 1, 2, 2, 3]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_cutting_changes_no_kept_row(tmp_path):
    path = tmp_path / "m"
    _write(path, MetricsRow(step=1, epoch=0, split="train", loss=0.1 + 0.2, lr=1e-5, tokens=7))
    before = path.read_bytes()
    cut_metrics(path, 1)
    assert path.read_bytes() == before


def test_cutting_an_absent_file_makes_none(tmp_path):
    cut_metrics(tmp_path / "m", 1)
    assert not (tmp_path / "m").exists()


def test_a_writer_without_sinks_takes_rows_and_does_nothing():
    with MetricsWriter() as writer:
        writer.write(MetricsRow(step=1, epoch=0, split="train"))


class Refusing(io.FileIO):
    """A file on a disk that has room for so many more bytes."""

    room = 0

    def write(self, data) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(data[: self.room])
        Refusing.room -= written
        return written


def test_rows_that_the_disk_refuses_are_a_warning_and_written_when_it_takes_them(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("builtins.open", lambda path, *_, **__: Refusing(path, "a"))
    with MetricsWriter([JsonLines(tmp_path / "m")]) as writer:
        for step, room in enumerate((1000, 7, 0, 1000, 0)):
            Refusing.room = room
            writer.write(MetricsRow(step=step, epoch=0, split="train"))
    monkeypatch.undo()
    assert [row["step"] for row in read_metrics(tmp_path / "m")] == [0, 1, 2, 3]
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"metrics cannot be written into {tmp_path / 'm'}: [Errno 28] No space left on device; training goes on"] * 2


def test_tensorboard_gets_the_numbers_of_a_row(tmp_path):
    (sink,) = open_tensorboard(tmp_path, 0)
    with MetricsWriter([sink]) as writer:
        writer.write(MetricsRow(step=3, epoch=0, split="train", loss=1.5, lr=0.25))
        writer.write(MetricsRow(step=5, epoch=0, split="valid", perplexity=90.0))
    assert _scalars(tmp_path) == {"train/loss": [(3, 1.5)], "train/lr": [(3, 0.25)], "valid/perplexity": [(5, 90.0)]}


def test_tensorboard_hides_what_lies_after_the_step_of_a_resumed_run(tmp_path):
    for after_step, steps in ((0, range(1, 5)), (2, range(3, 4))):
        sink = TensorBoard(tmp_path, after_step)
        for step in steps:
            sink.write(MetricsRow(step=step, epoch=0, split="train", loss=after_step))
        sink.close()
    assert _scalars(tmp_path) == {"train/loss": [(1, 0), (2, 0), (3, 2)]}


def _scalars(path) -> dict:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_without_tensorboard_a_line_says_how_to_get_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    caplog.set_level("INFO", "hora")
    assert open_tensorboard(tmp_path / "tensorboard", 0) == []
    assert "pip install 'hora[tensorboard]'" in caplog.text
