"""The runs of `hora scale`: their order, and what is said of those that cannot be used."""

import json
from pathlib import Path

import pytest

from hora import env
from hora.diag.prove.request import with_ranks
from hora.diag.prove.run import Ended, Start
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
    path.write_text('{"no": "rows"}')
    with pytest.raises(ScaleError, match="must be a file of `hora bench allreduce --json`"):
        read_timings(path)
