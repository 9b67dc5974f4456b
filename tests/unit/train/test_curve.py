import math
import subprocess
import sys
from pathlib import Path

from hora.train.curve import draw_curve
from hora.train.metrics import JsonLines, MetricsRow


def _write(path, *rows: MetricsRow) -> None:
    writer = JsonLines(path)
    for row in rows:
        writer.write(row)
    writer.close()


def test_a_curve_is_a_png(tmp_path):
    rows = (MetricsRow(step=step, epoch=0, split=split, perplexity=100.0 / (step + 1)) for step in range(5) for split in ("train", "valid"))
    _write(tmp_path / "m", *rows, MetricsRow(step=9, epoch=0, split="test"))
    assert draw_curve(tmp_path / "m", tmp_path / "curve.png")
    content = (tmp_path / "curve.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 5000


def test_a_disk_that_refuses_the_picture_is_a_warning(tmp_path, caplog):
    _write(tmp_path / "m", MetricsRow(step=1, epoch=0, split="train", perplexity=2.0))
    assert not draw_curve(tmp_path / "m", Path("/dev/full"))
    assert "/dev/full could not be written: [Errno 28] No space left on device" in caplog.text


def test_measurements_that_cannot_be_read_are_a_warning(tmp_path, caplog):
    assert not draw_curve(tmp_path / "gone", tmp_path / "curve.png")
    assert "gone cannot be read: [Errno 2] No such file or directory" in caplog.text


def test_without_numbers_nothing_is_drawn_and_a_line_says_why(tmp_path, caplog):
    caplog.set_level("INFO", "hora")
    _write(tmp_path / "m", MetricsRow(step=1, epoch=0, split="train"))
    assert not draw_curve(tmp_path / "m", tmp_path / "curve.png")
    assert "has no perplexity" in caplog.text
    assert not (tmp_path / "curve.png").exists()


def test_values_that_no_axis_reaches_are_left_out(tmp_path):
    rows = [MetricsRow(step=step, epoch=0, split="train", perplexity=value) for step, value in enumerate((2.0, 1e308, math.inf))]
    _write(tmp_path / "m", *rows)
    assert draw_curve(tmp_path / "m", tmp_path / "curve.png")


def test_without_matplotlib_a_line_says_how_to_get_it(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "hora")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _write(tmp_path / "m", MetricsRow(step=1, epoch=0, split="train", perplexity=1.0))
    assert not draw_curve(tmp_path / "m", tmp_path / "curve.png")
    assert "pip install 'hora[plot]'" in caplog.text


def test_matplotlib_is_loaded_only_to_draw():
    code = "import sys, hora.train.curve, hora.train.metrics; sys.exit('matplotlib' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
