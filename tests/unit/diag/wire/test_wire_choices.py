import logging

import pytest

from hora import env
from hora.comm.algorithms import algorithm_table, own_algorithm_table
from hora.comm.algorithms.auto import table_path
from hora.diag.wire.choices import entries_from, save
from hora.errors import ConfigError
from hora.plan.algorithm_table import Table, choose, dump


def row(size: int, algorithm: str, *samples: float, ranks: int = 2, backend: str = "gloo") -> dict:
    return {
        "device": "cpu", "backend": backend, "ranks": ranks, "nodes": 1, "interleaved": False,
        "bytes": size, "algorithm": algorithm, "samples": list(samples),
    }  # fmt: skip


@pytest.fixture(autouse=True)
def state_dir(tmp_path, monkeypatch):
    monkeypatch.setenv(env.STATE_DIR, str(tmp_path / "state"))


def test_the_fastest_of_each_size_is_chosen_where_it_is_clearly_faster():
    rows = [
        *(row(1024, name, *samples) for name, samples in {"native": (10, 10, 10), "ring": (9.5, 9.5, 9.5)}.items()),
        *(row(4096, name, *samples) for name, samples in {"native": (10, 10, 10), "ring": (5, 5, 5), "ordered": (4, 4, 4)}.items()),
        *(row(16384, name, *samples) for name, samples in {"native": (10, 10, 10), "ordered": (4, 4, 4)}.items()),
        *(row(65536, name, *samples) for name, samples in {"native": (9, 2, 9, 2, 9), "ring": (8, 3, 1, 3, 3)}.items()),
    ]
    (entry,) = entries_from(rows)
    assert (entry.backend, entry.ranks, entry.steps) == ("gloo", 2, ((0, "native"), (4096, "ordered"), (65536, "native")))


def test_below_a_large_smallest_size_nothing_is_said():
    (entry,) = entries_from([row(1 << 20, "native", 10), row(1 << 20, "ring", 5)])
    assert entry.steps == ((1 << 20, "ring"),)


def test_without_native_or_for_auto_nothing_is_learnt():
    assert entries_from([row(1024, "ring", 5)]) == []
    (entry,) = entries_from([row(1024, "native", 10), row(1024, "auto", 5)])
    assert entry.steps == ((0, "native"),)


def test_what_is_saved_is_what_auto_takes_and_other_places_are_kept():
    save([row(1024, "native", 10), row(1024, "ring", 5)])
    path = save([row(1024, "native", 10, ranks=4), row(1024, "ordered", 5, ranks=4)])
    assert path == table_path()
    table = algorithm_table(own_algorithm_table())
    assert [choose(table, 1024, "cpu", "gloo", ranks, 1) for ranks in (2, 4)] == ["ring", "ordered"]


@pytest.mark.parametrize("text", ["", "{", '{"format": 1, "entries": [{}]}', "[" * 100_000, "\ud800"])
def test_a_damaged_table_is_left_out_with_a_warning_and_written_anew(text, caplog):
    table_path().parent.mkdir()
    table_path().write_bytes(text.encode(errors="surrogatepass"))
    with caplog.at_level(logging.WARNING, "hora"):
        assert own_algorithm_table() is None
    assert f"{table_path()} is left out, for it is damaged: " in caplog.text
    save([row(1024, "native", 10), row(1024, "ring", 5)])
    assert choose(algorithm_table(own_algorithm_table()), 1024, "cpu", "gloo", 2, 1) == "ring"


def test_without_a_table_of_the_user_s_nobody_is_warned(caplog):
    assert own_algorithm_table() is None
    assert caplog.text == ""


def test_a_table_cannot_have_auto_choose_itself():
    table_path().parent.mkdir()
    table_path().write_text(dump(Table(tuple(entries_from([row(1024, "native", 1)])))).replace("native", "auto"))
    assert own_algorithm_table() is None


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "state").write_text("")
    with pytest.raises(ConfigError, match="cannot write .*state/algorithms.json: .*HORA_STATE_DIR"):
        save([row(1024, "native", 10)])
