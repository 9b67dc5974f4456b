import os
import shutil
from pathlib import Path

import pytest

from hora.comm.owner import Owner
from hora.errors import CheckpointIncomplete
from hora.train.checkpoint.manifest import CheckpointName, Manifest
from hora.train.checkpoint.storage import Storage, verify

NAME = CheckpointName(0, 7)
CONTENT = {"model.safetensors": b"tensors" * 100, "model.json": b"{}"}


def _write(storage: Storage, name: CheckpointName = NAME) -> Path:
    with storage.write(name) as draft:
        for file, content in CONTENT.items():
            draft.add(file, [content])
        return storage.commit(draft, _manifest(name, draft.files))


def _manifest(name: CheckpointName, files: dict) -> Manifest:
    return Manifest(1, "0", "0", name.step, 0, name.generation, 1, 1, None, "a machine", None, "", files)


def test_what_is_written_is_found_and_whole(tmp_path):
    storage = Storage(tmp_path / "deep" / "er")
    path = _write(storage)
    assert path == tmp_path / "deep" / "er" / "step-00000007.g0"
    assert storage.names() == [NAME]
    assert verify(path) == storage.manifest(NAME)
    assert {name: (path / name).read_bytes() for name in CONTENT} == CONTENT
    assert os.listdir(storage.path) == [str(NAME)]


def test_a_directory_that_does_not_exist_holds_nothing(tmp_path):
    storage = Storage(tmp_path / "absent")
    assert storage.names() == []
    assert storage.sweep() == []
    assert storage.free_bytes() > 0


def test_names_are_sorted_and_foreign_entries_ignored(tmp_path):
    storage = Storage(tmp_path)
    for name in (CheckpointName(1, 3), CheckpointName(0, 5), CheckpointName(0, 4)):
        _write(storage, name)
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-00000009.g9").write_text("a file")
    (tmp_path / "step-00000010.g9").symlink_to(tmp_path / "step-00000003.g1")
    assert storage.names() == [CheckpointName(0, 4), CheckpointName(0, 5), CheckpointName(1, 3)]


def test_a_draft_that_fails_leaves_nothing(tmp_path):
    storage = Storage(tmp_path)
    with pytest.raises(ZeroDivisionError), storage.write(NAME) as draft:
        draft.add("model.json", [b"{}"])
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


def test_a_taken_name_is_not_replaced(tmp_path):
    storage = Storage(tmp_path)
    _write(storage)
    before = storage.manifest(NAME)
    with pytest.raises(OSError):
        _write(storage)
    assert verify(tmp_path / str(NAME)) == before
    assert os.listdir(tmp_path) == [str(NAME)]


def test_removal_takes_the_whole(tmp_path):
    storage = Storage(tmp_path)
    _write(storage)
    storage.remove(NAME)
    assert os.listdir(tmp_path) == []


def test_a_half_removed_checkpoint_does_not_look_complete(tmp_path, monkeypatch):
    storage = Storage(tmp_path)
    _write(storage)
    monkeypatch.setattr(shutil, "rmtree", lambda path: None)
    storage.remove(NAME)
    assert storage.names() == []
    assert len(os.listdir(tmp_path)) == 1


def test_a_renamed_checkpoint_is_not_taken_for_another(tmp_path):
    storage = Storage(tmp_path)
    _write(storage).rename(tmp_path / "step-00000009.g0")
    with pytest.raises(CheckpointIncomplete, match=r"has the manifest of step-00000007\.g0"):
        storage.manifest(CheckpointName(0, 9))


@pytest.mark.parametrize("file", ["model.json", "model.safetensors", "manifest.json"])
@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: os.truncate(path, 1), lambda path: (path.unlink(), path.symlink_to("/etc/passwd"))]
)
def test_a_missing_short_or_linked_file_is_named(tmp_path, file, damage):
    storage = Storage(tmp_path)
    damage(_write(storage) / file)
    with pytest.raises(CheckpointIncomplete, match=rf"step-00000007\.g0 is damaged: .*{file}"):
        storage.manifest(NAME)


def test_changed_content_is_found_by_its_digest(tmp_path):
    storage = Storage(tmp_path)
    path = _write(storage)
    (path / "model.json").write_bytes(b"[]")
    with pytest.raises(CheckpointIncomplete, match=r"model\.json must have SHA-256 \w{64}, but has \w{64} instead"):
        verify(path)


def test_sweep_removes_what_dead_processes_left(tmp_path):
    storage, mine = Storage(tmp_path), Owner.current()
    dead = Owner(mine.host, mine.machine, mine.pid, mine.started - 1)
    for name in (f".tmp-step-00000001.g0-{dead.token}", f".trash-step-00000002.g0-{mine.token}", ".trash-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.json").write_bytes(b"{}")
    (tmp_path / f".tmp-probe-{dead.token}").write_bytes(b"probe")
    assert len(storage.sweep()) == 4
    assert os.listdir(tmp_path) == []


def test_sweep_leaves_the_living_and_the_unknown_alone(tmp_path):
    storage = Storage(tmp_path)
    kept = [f".tmp-step-00000001.g0-{Owner.current().token}", ".tmp-step-00000001.g0-00000000-1-1", "notes"]
    for name in kept:
        (tmp_path / name).mkdir()
    assert storage.sweep() == []
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


def test_sweep_removes_the_unknown_after_a_day(tmp_path):
    draft = tmp_path / ".tmp-step-00000001.g0-00000000-1-1"
    draft.mkdir()
    os.utime(draft, (0, 0))
    assert Storage(tmp_path).sweep() == [draft.name]


def test_a_writer_whose_draft_was_swept_cannot_commit(tmp_path):
    storage = Storage(tmp_path)
    with pytest.raises(FileNotFoundError), storage.write(NAME) as draft:
        draft.add("model.json", [b"{}"])
        storage._discard(draft.path.name)
        storage.commit(draft, _manifest(NAME, draft.files))
    assert os.listdir(tmp_path) == []


def test_probe_leaves_nothing(tmp_path):
    Storage(tmp_path / "new").probe()
    assert os.listdir(tmp_path / "new") == []


def test_probe_fails_where_nothing_can_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        Storage(tmp_path / "file").probe()
