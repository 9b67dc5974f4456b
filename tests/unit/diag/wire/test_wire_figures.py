import json
import logging

import pytest

from hora import env
from hora.diag.wire.figures import Place, bandwidth_at, figures_path, read_figures, save_figures
from hora.errors import ConfigError

PLACE = Place("cpu", "gloo", 2, 1)


def row(size: int, median_us: float, *, algorithm: str = "native", captured: bool = False, **place) -> dict:
    return {**PLACE._asdict(), **place, "bytes": size, "median_us": median_us, "algorithm": algorithm, "captured": captured}


@pytest.fixture(autouse=True)
def state_dir(tmp_path, monkeypatch):
    monkeypatch.setenv(env.STATE_DIR, str(tmp_path / "state"))


def test_times_of_native_are_kept_by_place():
    assert read_figures() == {}
    save_figures([row(1024, 10), row(4096, 20), row(4096, 5, algorithm="ring"), row(4096, 1, captured=True)])
    assert read_figures() == {PLACE: {1024: 10.0, 4096: 20.0}}
    save_figures([row(1024, 7, ranks=4)])
    save_figures([row(2048, 12)])
    assert read_figures() == {PLACE: {2048: 12.0}, PLACE._replace(ranks=4): {1024: 7.0}}


def test_bandwidth_between_two_sizes_is_between_theirs():
    figures = {PLACE: {1_000_000: 1000.0, 4_000_000: 2000.0}}
    assert bandwidth_at(figures, PLACE, 1_000_000) == pytest.approx(1.0)
    assert bandwidth_at(figures, PLACE, 4_000_000) == pytest.approx(2.0)
    assert bandwidth_at(figures, PLACE, 2_000_000) == pytest.approx(2**0.5)
    assert bandwidth_at(figures, PLACE, 600_000) == pytest.approx(1.0)
    assert bandwidth_at(figures, PLACE, 8_000_000) == pytest.approx(2.0)
    assert bandwidth_at(figures, PLACE, 100_000) is bandwidth_at(figures, PLACE, 9_000_000) is None
    assert bandwidth_at(figures, PLACE._replace(backend="shm"), 1_000_000) is None


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 2, "entries": []}', '{"format": 1, "entries": [{}]}', '{"format": 1, "entries": [1]}']
)
def test_a_damaged_file_is_left_out_with_a_warning(text, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hora"), "propagate", True)
    figures_path().parent.mkdir()
    figures_path().write_text(text)
    assert read_figures() == {}
    assert "is left out, for it is damaged" in caplog.text
    save_figures([row(1024, 10)])
    assert json.loads(figures_path().read_text())["format"] == 1


def test_a_directory_that_cannot_be_written_is_a_mistake_of_the_user(tmp_path):
    (tmp_path / "state").write_text("in the way")
    with pytest.raises(ConfigError, match="name another directory in HORA_STATE_DIR"):
        save_figures([row(1024, 10)])
