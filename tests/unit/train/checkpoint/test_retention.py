import pytest

from hora.errors import ConfigError
from hora.train.checkpoint.manifest import CheckpointName, Manifest
from hora.train.checkpoint.retention import Retention, survey
from hora.train.checkpoint.storage import Storage


def _names(*pairs: tuple[int, int]) -> list[CheckpointName]:
    return [CheckpointName(generation, step) for generation, step in pairs]


def _write(storage: Storage, step: int, generation: int = 0, metric: float | None = None, version: int = 1) -> CheckpointName:
    name = CheckpointName(generation, step)
    with storage.write(name) as draft:
        draft.add("model.json", [b"{}"])
        storage.commit(draft, Manifest(version, "0", "0", step, 0, generation, 1, 1, None, "a machine", metric, "", draft.files))
    return name


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Retention(keep_last=1, keep_best=0), [(1, 2)]),
        (Retention(keep_last=2, keep_best=0), [(0, 9), (1, 2)]),
        (Retention(keep_last=9, keep_best=0), [(0, 1), (0, 3), (0, 5), (0, 9), (1, 2)]),
        (Retention(keep_last=1, keep_best=1, best="min"), [(0, 3), (1, 2)]),
        (Retention(keep_last=1, keep_best=1, best="max"), [(0, 9), (1, 2)]),
        (Retention(keep_last=1, keep_best=2, best="min"), [(0, 3), (0, 5), (1, 2)]),
        (Retention(keep_last=1, keep_best=9), [(0, 3), (0, 5), (0, 9), (1, 2)]),
    ],
)
def test_the_last_and_the_best_are_kept(rule, kept):
    metrics = dict(zip(_names((0, 1), (0, 3), (0, 5), (0, 9), (1, 2)), [None, 1.0, 1.0, 2.0, None], strict=True))
    assert sorted(rule.kept(metrics)) == _names(*kept)


def test_of_equally_good_ones_the_older_is_the_best():
    assert Retention().ranked(dict.fromkeys(_names((1, 1), (0, 3), (0, 2)), 1.0)) == _names((0, 2), (0, 3), (1, 1))


@pytest.mark.parametrize("arguments", [{"keep_last": 0}, {"keep_best": -1}, {"best": "least"}])
def test_an_impossible_rule_is_refused(arguments):
    with pytest.raises(ConfigError, match=f"{next(iter(arguments))} must be"):
        Retention(**arguments)


def test_pruning_removes_all_but_the_kept(tmp_path):
    storage = Storage(tmp_path)
    for step in range(5):
        _write(storage, step, metric=float(abs(step - 1)))
    Retention(keep_last=2, keep_best=1).prune(storage)
    assert storage.names() == _names((0, 1), (0, 3), (0, 4))
    assert len(list(tmp_path.iterdir())) == 3


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path):
    storage = Storage(tmp_path)
    for step in range(4):
        _write(storage, step)
    (tmp_path / "step-00000003.g0" / "model.json").unlink()
    Retention(keep_last=1, keep_best=0).prune(storage, damaged={CheckpointName(0, 2)})
    assert storage.names() == _names((0, 1))


def test_nothing_is_removed_when_nothing_whole_would_stay(tmp_path):
    storage = Storage(tmp_path)
    damaged = {_write(storage, step) for step in range(3)}
    Retention(keep_last=1).prune(storage, damaged)
    assert len(storage.names()) == 3


def test_a_checkpoint_of_a_newer_version_is_left_alone(tmp_path):
    storage = Storage(tmp_path)
    newer = _write(storage, 0, version=2)
    for step in range(1, 4):
        _write(storage, step)
    Retention(keep_last=1, keep_best=0).prune(storage)
    assert storage.names() == [newer, CheckpointName(0, 3)]


def test_what_cannot_be_removed_is_a_warning(tmp_path, monkeypatch, caplog):
    storage = Storage(tmp_path)
    for step in range(3):
        _write(storage, step)

    def fail(self: Storage, name: CheckpointName) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Storage, "remove", fail)
    Retention(keep_last=1, keep_best=0).prune(storage)
    assert [record.args[0].name for record in caplog.records] == ["step-00000000.g0", "step-00000001.g0"]


def test_survey_tells_whole_from_damaged(tmp_path):
    storage = Storage(tmp_path)
    whole, damaged = _write(storage, 1, metric=0.5), _write(storage, 2)
    (tmp_path / str(damaged) / "manifest.json").write_bytes(b"")
    assert survey(storage) == ({whole: 0.5}, [damaged])
