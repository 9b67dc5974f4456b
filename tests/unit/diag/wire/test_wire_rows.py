import sys

import pytest
from rich.console import Console

from hora.diag.output import require_matplotlib
from hora.diag.ranks import read_results
from hora.diag.wire.picture import draw
from hora.diag.wire.rows import rows_of, with_origin
from hora.diag.wire.table import notes, table
from hora.errors import ConfigError, HoraError

POINT = {
    "size": 4000, "ranks": 4, "nodes": 1, "interleaved": False, "device": "cpu", "limit": "memory copy",
    "samples": {"limit": [1.0, 3.0, 2.0], "shm/native": [4.0, 5.0, 9.0], "gloo/ring": [50.0, 40.0, 60.0]},
}  # fmt: skip


def test_a_row_has_times_bandwidths_and_the_limit():
    native, ring = rows_of(POINT)
    assert (native["backend"], native["algorithm"], native["bytes"], native["ranks"]) == ("shm", "native", 4000, 4)
    assert (native["median_us"], native["min_us"], native["max_us"]) == (5.0, 4.0, 9.0)
    assert native["alg_gb_s"] == pytest.approx(0.8)  # 4000 bytes in 5 us
    assert native["bus_gb_s"] == pytest.approx(1.2)  # 2 * 3/4 of them
    assert native["limit_gb_s"] == ring["limit_gb_s"] == pytest.approx(3.0)
    assert ring["samples"] == [50.0, 40.0, 60.0]


def test_rows_for_a_file_say_where_they_come_from():
    (native, _) = with_origin(rows_of(POINT), ["hora", "bench", "a b"])
    assert (native["what"], native["value"], native["unit"]) == ("allreduce/shm/native/4000", 5.0, "us")
    assert native["command"] == "hora bench 'a b'"
    assert native.keys() >= {"machine", "versions", "commit"}


def test_the_table_compares_with_the_limit_and_with_the_first():
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table(rows_of(POINT)))
    header, native, ring = captured.get().splitlines()
    assert header.split()[:4] == ["size", "backend", "algorithm", "ranks"]
    assert native.split() == ["4000", "B", "shm", "native", "4", "5.0", "us", "4.0..9.0", "0.8", "1.2", "40.0", "1.00"]
    assert ring.split()[-2:] == ["4.0", "10.00"]
    assert "cpu: memory copy" in notes(rows_of(POINT))[1]


def test_what_is_captured_is_compared_with_what_is_captured():
    point = POINT | {"samples": POINT["samples"] | {"shm/native/graph": [2.0], "gloo/ring/graph": [3.0]}}
    rows = rows_of(point)
    assert [row["captured"] for row in rows] == [False, False, True, True]
    assert with_origin(rows, [])[2]["what"] == "allreduce/shm/native/graph/4000"
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table(rows))
    assert [line.split()[-1] for line in captured.get().splitlines()[1:]] == ["1.00", "10.00", "1.00", "1.50"]
    assert "ring in a graph" in captured.get()


def test_a_picture_is_a_png(tmp_path):
    draw([*rows_of(POINT), *rows_of(POINT | {"size": 8000}), *rows_of(POINT | {"ranks": 2})], tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_command_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="--png needs matplotlib, which is not installed; pip install 'hora\\[plot\\]'"):
        require_matplotlib()


def test_a_line_that_is_being_written_is_left_for_later(tmp_path):
    assert read_results(tmp_path / "none") == []
    (tmp_path / "results").write_text('{"size": 1}\n{"size": 2}\n{"si')
    assert read_results(tmp_path / "results") == [{"size": 1}, {"size": 2}]


def test_a_wrong_sum_is_an_error(tmp_path):
    (tmp_path / "results").write_text('{"size": 1}\n{"wrong": "wrong sum of 1 KiB"}\n')
    with pytest.raises(HoraError, match="wrong sum of 1 KiB"):
        read_results(tmp_path / "results")
