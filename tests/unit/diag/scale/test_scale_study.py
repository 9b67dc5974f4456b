"""The runs of `hora scale`: their order, and what is said of those that cannot be used."""

import json
from pathlib import Path

import pytest

from hora import env
from hora.diag.prove.request import with_ranks
from hora.diag.prove.run import Ended, Start
from hora.diag.scale import course
from hora.diag.scale.point import PARTS
from hora.diag.scale.request import Request
from hora.diag.scale.study import ScaleError, Study, read_timings
from hora.errors import ConfigError


def request_in(path: Path, **changes) -> Request:
    given = {"words": ("train.py", "--batch", "{64/ranks}"), "ranks": (1, 2), "kind": "strong", "repeats": 2, "directory": path / "runs"}
    return Request(**given | changes)


class Runs:
    """Stands for the runs of a script whose step takes 0.1 s over the ranks."""

    def __init__(self, exit_code: int | None = 0, world_size: int | None = None, leaves: bool = True) -> None:
        self.exit_code, self.world_size, self.leaves = exit_code, world_size, leaves
        self.started: list[tuple[int, list[str]]] = []

    def __call__(self, start: Start) -> Ended:
        self.started.append((start.ranks, list(start.words)))
        times = {part: {"median_s": 0.0} for part in PARTS} | {"step": {"median_s": 0.1 / start.ranks}}
        report = {
            "times": times, "late": None, "sums_bytes": [], "backend": "gloo", "device": "cpu", "replayed": 0.0, "advice": "", "steps": 30,
            "world_size": self.world_size or start.ranks,
        }  # fmt: skip
        if self.leaves:
            Path(start.environ[env.REPORT_JSON]).write_text(json.dumps(report))
        return Ended(self.exit_code, "the last line")


def test_runs_take_turns_with_their_own_words(tmp_path):
    runs = Runs()
    points = Study(request_in(tmp_path), starter=runs).measure()
    assert [(point.ranks, point.step_s) for point in points] == [(1, (0.1, 0.1)), (2, (0.05, 0.05))]
    assert runs.started == [(n, ["train.py", "--batch", str(64 // n)]) for n in (1, 2, 2, 1)]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (Runs(exit_code=3), "failed with exit code 3.*the last line"),
        (Runs(exit_code=None), "had not ended after its time"),
        (Runs(leaves=False), "must make steps with hora.DistributedOptimizer"),
        (Runs(world_size=1), "trained on 1"),
    ],
)
def test_a_run_that_says_nothing_ends_the_study(tmp_path, runs, words):
    with pytest.raises(ScaleError, match=f"(?s){words}"):
        Study(request_in(tmp_path, ranks=(2, 4)), starter=runs).measure()


def test_a_directory_with_another_study_is_refused(tmp_path):
    Study(request_in(tmp_path), starter=Runs()).measure()
    with pytest.raises(ScaleError, match="1-ranks-1 cannot be made: File exists; give --dir a directory that no study was left in"):
        Study(request_in(tmp_path), starter=Runs()).measure()


def test_mistakes_are_told_together(tmp_path):
    with pytest.raises(ConfigError, match="--timeout must be.*--to must be more.*64/3"):
        request_in(tmp_path, ranks=(1, 3), timeout_s=0, to=2)


def test_products_and_quotients_of_ranks():
    assert with_ranks("{64*ranks} {64/ranks} {ranks}", 4) == "256 16 4"


def test_what_is_no_file_of_rows_is_refused(tmp_path):
    path = tmp_path / "rows.json"
    for text in ('{"no": "rows"}', "[]", '[{"what": "x"}]', '[{"ranks": 2, "nodes": 1, "bytes": 8, "median_us": 0}]'):
        path.write_text(text)
        with pytest.raises(ScaleError, match="must be a file of `hora bench allreduce --json`"):
            read_timings(path)


def row_of(backend: str, *, ranks: int = 2) -> dict:
    return {"ranks": ranks, "nodes": 1, "bytes": 4096, "median_us": 50.0, "backend": backend, "device": "cpu", "algorithm": "native"}


def test_sums_of_another_backend_predict_nothing_but_the_runs_are_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(course, "Study", lambda request, say: Study(request, say, starter=Runs()))
    timings = tmp_path / "rows.json"
    for number, rows in enumerate(([row_of("shm")], [row_of("gloo", ranks=1)])):
        timings.write_text(json.dumps(rows))
        request = request_in(tmp_path, to=8, directory=tmp_path / str(number))
        assert course.scale(request, timings=timings, check=False, json_file=None, png=None) == 2
        told = capsys.readouterr()
        assert all(column in told.out for column in ("speed-up", "efficiency", "exposed sums"))
        assert "predicted" not in told.out
        assert "nothing is predicted: --timings must hold sums of the backend that the script uses, gloo on cpu" in told.err
    timings.write_text(json.dumps([row_of("gloo"), row_of("shm")]))
    request = request_in(tmp_path, to=8, directory=tmp_path / "last")
    assert course.scale(request, timings=timings, check=False, json_file=None, png=None) == 0
    assert "predicted, if additional ranks are like these" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "told"), [(("train.py", "--batch", "64"), True), (("train.py", "--batch", "{64*ranks}"), False)])
def test_weak_scaling_says_what_it_takes_for_granted(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(course, "Study", lambda request, say: Study(request, say, starter=Runs()))
    assert course.scale(request_in(tmp_path, words=words, kind="weak"), timings=None, check=False, json_file=None, png=None) == 0
    assert ("No argument has {ranks} in it" in capsys.readouterr().out) == told


def test_timings_are_read_before_the_runs(tmp_path, capsys):
    (tmp_path / "rows.json").write_text("[]")
    request = request_in(tmp_path, to=8)
    assert course.scale(request, timings=tmp_path / "rows.json", check=True, json_file=None, png=None) == 2
    assert "it has no row of a sum" in capsys.readouterr().err
    assert not request.directory.exists()
