import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hora.cli.main import main
from hora.recipes.lm.vocabulary import Vocabulary as LmVocabulary
from hora.train.checkpoint.content import Entry
from hora.train.checkpoint.manifest import CheckpointName, Manifest
from hora.train.checkpoint.storage import Storage

MODEL = {"module.weight": torch.arange(6.0).view(2, 3), "module.steps": torch.tensor(3)}
STATE = {"model": MODEL, "optimizer": {"state": {0: {"exp_avg": torch.ones(5)}}, "note": "n" * 70_000}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with three checkpoints."""
    run = tmp_path_factory.mktemp("run")
    storage = Storage(run / "checkpoints")
    for step, metric in ((5, 0.5), (10, None), (2, 0.25)):
        name = CheckpointName(generation=int(step == 2), step=step)
        with storage.write(name) as draft:
            for file in [file for entry, tree in STATE.items() for file in Entry.of(entry, tree).files()]:
                draft.add(file.name, file.chunks())
            facts = Manifest(
                1, "0.1", "2.10", step, 3, name.generation, 2, 4, None, "a chip", metric, "2030-01-01T00:00:00+00:00", draft.files
            )
            storage.commit(draft, facts)
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def _spoil(run: Path) -> None:
    path = run / "checkpoints" / "step-00000010.g0"
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)
    (path / "optimizer.json").unlink()


def _help_texts() -> list[list[str]]:
    return [["checkpoint", name] for name in ("show", "verify", "export", "average")]


@pytest.mark.parametrize("words", _help_texts(), ids=" ".join)
def test_each_has_help_with_an_example(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--help"]) == 0
    assert f"hora {' '.join(words)} runs" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["", "checkpoints"])
def test_checkpoints_are_shown_in_a_table_the_newest_last(run: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    _spoil(run)
    assert main(["checkpoint", "show", str(run / where)]) == 0
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head == ["step", "epoch", "metric", "size", "generation", "state"]
    assert [row[:3] for row in rows] == [["5", "3", "0.5"], ["10", "3", "-"], ["2", "3", "0.25"]]
    assert [row[5] for row in rows] == ["0", "0", "1"]
    assert " ".join(rows[0][6:]) == "step-00000005.g0: whole"
    assert " ".join(rows[1][6:]) == "step-00000010.g0: damaged: optimizer.json No such file or directory"


def test_one_is_shown_with_its_facts_and_tensors(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "checkpoints" / "step-00000005.g0"
    assert main(["checkpoint", "show", str(path), "--json", str(tmp_path / "out.json")]) == 0
    shown = capsys.readouterr().out
    assert f"{path}: whole" in shown
    assert "step 5, epoch 3 (counted from 0), metric 0.5, generation 0" in shown
    assert "by hora 0.1 and torch 2.10 on 2 ranks (a chip)" in shown
    words = [line.split(maxsplit=2) for line in shown.splitlines()]
    assert ["module.weight", "F32", "[2, 3]"] in words
    assert ["module.steps", "I64", "[]"] in words
    assert ["state.0.exp_avg", "F32", "[5]"] in words
    (row,) = json.loads((tmp_path / "out.json").read_text())
    assert row["whole"]
    assert row["manifest"]["step"] == 5
    assert row["entries"]["model"]["module.weight"] == {"dtype": "F32", "shape": [2, 3]}


def test_whole_checkpoints_are_verified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"step-{name}  whole" for name in ("00000005.g0", "00000010.g0", "00000002.g1")]


def test_all_damaged_files_are_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _spoil(run)
    (run / "checkpoints" / "step-00000002.g1" / "manifest.json").write_bytes(b"{}")
    assert main(["checkpoint", "verify", str(run), "--json", str(tmp_path / "out.json")]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "step-00000010.g0  damaged: model.safetensors differs from its digest; optimizer.json No such file or directory",
        "step-00000002.g1  damaged: manifest.json is damaged: it differs from its own digest",
    ]
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["whole"] for row in rows] == [True, False, False]
    assert list(rows[1]["damage"]) == ["model.safetensors", "optimizer.json"]
    assert main(["checkpoint", "verify", str(run / "checkpoints" / "step-00000005.g0")]) == 0


def test_every_flipped_bit_is_verified_and_every_cut_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "checkpoints" / "step-00000005.g0" / "model.safetensors"
    content = path.read_bytes()
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1 << position % 8]) + content[position + 1 :])
        assert main(["checkpoint", "verify", str(path.parent)]) == 1
    path.write_bytes(content[:-1])
    assert main(["checkpoint", "show", str(path.parent)]) == 0
    assert f"model.safetensors must have {len(content)} bytes, but has {len(content) - 1} instead" in capsys.readouterr().out


def test_a_checkpoint_in_anothers_place_is_damaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run / "checkpoints"
    shutil.rmtree(directory / "step-00000010.g0")
    (directory / "step-00000005.g0").rename(directory / "step-00000010.g0")
    assert main(["checkpoint", "verify", str(directory / "step-00000010.g0")]) == 1
    assert "manifest.json is that of step-00000005.g0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [["show"], ["verify"], ["export", "--to", "new.safetensors"], ["average", "--to", "new.safetensors"]],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("name", ["", "absent", "step-00000005.g0"])
def test_a_place_without_checkpoints_is_refused(words: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", words[0], str(tmp_path / name), *words[1:]]) == 2
    assert "must be a checkpoint (step-...), a directory of checkpoints or a run directory" in capsys.readouterr().err


def test_the_tensors_of_the_newest_are_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "model.safetensors"
    words = ["--strip", "module.", "--prefix", "net.", "--dtype", "bfloat16"]
    assert main(["checkpoint", "export", str(run), "--to", str(to), *words]) == 0
    assert f"2 tensors of 'model' in {run / 'checkpoints' / 'step-00000002.g1'} are in {to}" in capsys.readouterr().out
    tensors = load_file(to)
    assert sorted(tensors) == ["net.steps", "net.weight"]
    assert torch.equal(tensors["net.weight"], MODEL["module.weight"].bfloat16())
    assert torch.equal(tensors["net.steps"], torch.tensor(3))
    with safe_open(to, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert os.listdir(tmp_path) in (["run", to.name], [to.name, "run"])


def test_what_is_no_tensor_is_not_exported(run: Path, tmp_path: Path) -> None:
    to = tmp_path / "o.safetensors"
    assert main(["checkpoint", "export", str(run), "--entry", "optimizer", "--to", str(to)]) == 0
    assert list(load_file(to)) == ["state.0.exp_avg"]


def test_an_export_overwrites_nothing_and_leaves_nothing_half_done(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "there.safetensors"
    to.write_text("mine")
    _spoil(run)
    damaged = run / "checkpoints" / "step-00000010.g0"
    for words, code, said in (
        ([run, "--to", to], 2, "must not exist, but does"),
        ([run, "--entry", "models", "--to", tmp_path / "new"], 2, "has no entry 'models'; choose one of: model, optimizer"),
        ([run, "--to", tmp_path / "absent" / "new"], 2, "cannot write"),
        ([damaged, "--to", tmp_path / "new"], 1, "is damaged"),
    ):
        assert main(["checkpoint", "export", *map(str, words)]) == code
        assert said in capsys.readouterr().err
    assert to.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["run", to.name]


def test_two_tensors_do_not_get_one_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = Storage(tmp_path / "checkpoints")
    with storage.write(CheckpointName(0, 1)) as draft:
        for file in Entry.of("model", {"a": torch.ones(1), "x.a": torch.ones(2)}).files():
            draft.add(file.name, file.chunks())
        storage.commit(draft, Manifest(1, "0", "0", 1, 0, 0, 1, 1, None, "a chip", None, "", draft.files))
    assert main(["checkpoint", "export", str(tmp_path), "--to", str(tmp_path / "new"), "--strip", "x."]) == 2
    assert "two are called 'a'; leave --strip out" in capsys.readouterr().err


def test_torch_is_not_loaded_to_look(run: Path) -> None:
    program = (
        "import sys\nfrom hora.cli.main import main\n"
        "codes = [main(['checkpoint', word, sys.argv[1]]) for word in ('show', 'verify')]\n"
        "sys.exit(str([name for name in ('torch', 'numpy') if name in sys.modules] + codes))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(run)], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "[0, 0]\n"


def _write_checkpoint(directory: Path, step: int, **tensors: torch.Tensor) -> None:
    name = CheckpointName(generation=0, step=step)
    storage = Storage(directory)
    with storage.write(name) as draft:
        for file in Entry.of("model", tensors).files():
            draft.add(file.name, file.chunks())
        storage.commit(draft, Manifest(1, "0.1", "2.10", step, 0, 0, 1, 1, None, "a chip", None, "2030-01-01T00:00:00+00:00", draft.files))


def test_the_mean_of_the_last_checkpoints_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, value in ((1, 100.0), (2, 1.0), (3, 2.0), (4, 6.0)):
        weight = torch.full((3,), value)
        _write_checkpoint(tmp_path, step, weight=weight, half=weight.bfloat16(), count=torch.tensor(step))
    to = tmp_path / "mean.safetensors"
    assert main(["checkpoint", "average", str(tmp_path), "--last", "3", "--to", str(to)]) == 0
    assert "the mean of 3 tensors of 'model' over 3 checkpoints is in" in capsys.readouterr().out
    found = load_file(to)
    assert found["weight"].tolist() == [3.0] * 3
    assert found["half"].dtype == torch.bfloat16
    assert found["count"].item() == 4
    some = [str(tmp_path / str(CheckpointName(generation=0, step=step))) for step in (1, 2)]
    assert main(["checkpoint", "average", *some, "--to", str(tmp_path / "some.safetensors")]) == 0
    assert load_file(tmp_path / "some.safetensors")["weight"].tolist() == [50.5] * 3


def test_means_that_cannot_be_made_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_checkpoint(tmp_path / "a", 1, weight=torch.ones(3))
    _write_checkpoint(tmp_path / "b", 1, weight=torch.ones(4), bias=torch.ones(1))
    to = tmp_path / "mean.safetensors"

    def refused(*words: str) -> str:
        assert main(["checkpoint", "average", *words, "--to", str(to)]) != 0
        assert not to.exists()
        return capsys.readouterr().err

    assert "at least two checkpoints" in refused(str(tmp_path / "a"))
    assert "differ in bias, weight" in refused(str(tmp_path / "a"), str(tmp_path / "b"))
    assert "more than once" in refused(str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "a" / "step-00000001.g0"))
    assert "has no entry 'other'" in refused(str(tmp_path / "a"), str(tmp_path / "b"), "--entry", "other")
    (tmp_path / "a" / "vocab.json").write_text(LmVocabulary(("a", "b")).to_json())
    (tmp_path / "b" / "vocab.json").write_text(LmVocabulary(("a", "c", "d")).to_json())
    said = f"{tmp_path}/a/vocab.json and {tmp_path}/b/vocab.json differ: words: 2 words and 3, of which word 2 is 'b' and 'c'. Give"
    assert said in refused(str(tmp_path / "a"), str(tmp_path / "b"))
