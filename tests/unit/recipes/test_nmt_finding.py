import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nmt_run_kit import make_config, make_model, make_run
from safetensors.torch import save_file

from hora.cli.main import main
from hora.comm.session import init, shutdown
from hora.errors import CheckpointError, CheckpointIncomplete, ConfigError
from hora.recipes.nmt.decoding.finding import find_all, find_trained
from hora.recipes.nmt.decoding.rules import Rules
from hora.recipes.nmt.decoding.translate import Job, load_models, read_source
from hora.train.checkpoint.content import Content

STEPS = {1: 21, 2: 8, 3: 13}


def test_of_a_run_the_best_checkpoint_is_taken_or_else_the_newest(tmp_path: Path):
    by_loss = make_run(tmp_path / "loss", STEPS, {1: 3.0, 2: 2.0})
    by_bleu = make_run(tmp_path / "bleu", STEPS, {1: 3.0, 2: 2.0}, bleu_valid_freq=10)
    without = make_run(tmp_path / "without", STEPS)
    found = [find_trained(path).weights.name for path in (by_loss, by_bleu, without)]
    assert found == ["step-00000002.g0", "step-00000001.g0", "step-00000003.g0"]
    (by_loss / "checkpoints" / "step-00000002.g0" / "model.safetensors").unlink()
    assert find_trained(by_loss).weights.name == "step-00000001.g0"
    assert find_trained(by_loss).config == make_config()


def test_the_configuration_is_found_above_weights_or_is_named(tmp_path: Path):
    run = make_run(tmp_path / "run", {1: 21})
    save_file(make_model(8).state_dict(), run / "mean.safetensors")
    assert find_trained(run / "mean.safetensors").weights == run / "mean.safetensors"
    elsewhere = Path(run / "mean.safetensors").rename(tmp_path / "mean.safetensors")
    assert find_trained(elsewhere, run / "config.yaml").weights == elsewhere
    with pytest.raises(ConfigError, match=r"no run directory with config.yaml and vocab.json"):
        find_trained(elsewhere)


def test_what_cannot_translate_is_refused(tmp_path: Path):
    run = make_run(tmp_path / "run", {1: 21})
    other = make_run(tmp_path / "other", {1: 21}, words="xyz")
    with pytest.raises(ConfigError, match="there is no "):
        find_trained(tmp_path / "absent")
    with pytest.raises(ConfigError, match="must have the same vocabularies"):
        find_all([run, other])
    (run / "checkpoints" / "step-00000001.g0" / "model.json").unlink()
    with pytest.raises(CheckpointError, match="every checkpoint at .* is damaged"):
        find_trained(run)


def test_averaged_weights_translate_where_there_are_any(tmp_path: Path):
    run = make_run(tmp_path / "run", {1: 21}, average=8)
    init(device="cpu")
    try:
        (model,), _ = load_models(Job([run], None, Rules(), 1))
    finally:
        shutdown()
    expected = make_model(8).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_of_a_checkpoint_only_what_is_wanted_is_read(tmp_path: Path):
    path = make_run(tmp_path / "run", {1: 21}, average=8) / "checkpoints" / "step-00000001.g0"
    file = path / "average.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert set(Content.read(path, ["model", "absent"]).entries) == {"model"}
    for entries in (["average"], None):
        with pytest.raises(CheckpointIncomplete, match=r"average.safetensors must have SHA-256"):
            Content.read(path, entries)


def test_lines_end_at_newlines_alone_and_must_be_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "text"
    path.write_bytes("a\u2028b\r\n\nc".encode())
    assert read_source(path) == ["a\u2028b", "", "c"]
    path.write_bytes(b"")
    assert read_source(path) == []
    for text, lines in ((b"", []), (b"\n", [""]), (b"a", ["a"]), (b"\n\n", ["", ""]), (b"\xef\xbb\xbfa\n", ["a"]), (b"\xef\xbb\xbf", [""])):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert read_source(None) == lines
        path.write_bytes(text)
        assert read_source(path) == lines
    path.write_bytes(b"a\nb\xff\n")
    with pytest.raises(ConfigError, match=r"text:2: a text must be UTF-8, but byte 2 of the line is not"):
        read_source(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--keep-n", "2"], "--saveto or --json must say where"),
        (["--keep-n", "6", "--saveto", "out"], "from 1 to beam_size = 5"),
        (["--source-path", "absent"], "--source-path must be a text"),
        (["--saveto", "absent/out"], "--saveto cannot write absent/out"),
        (["--json", "."], "--json cannot write ."),
        (["--model-path", "absent"], "there is no absent"),
        (["--source-path", __file__, "--saveto", __file__], "--saveto would write over"),
        (["--keep-n", "2", "--saveto", "out", "--json", "out.1"], "--json would write over out.1, which --saveto names already"),
    ],
)
def test_mistakes_are_told_before_anything_starts(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make_run(tmp_path / "run", {1: 21})
    assert main(["translate", "--model-path", str(run), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_rank_of_a_launcher_needs_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    run = make_run(tmp_path / "run", {1: 21})
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for words in (["--source-path", str(run / "config.yaml")], ["--saveto", str(tmp_path / "out")]):
        assert main(["translate", "--model-path", str(run), *words]) == 2
        assert "give --source-path, and --saveto or --json" in capsys.readouterr().err


def test_mistakes_are_told_without_torch(tmp_path: Path):
    run = make_run(tmp_path / "run", {1: 21})
    script = "import sys; from hora.cli.main import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    words = ["translate", "--model-path", str(run), "--source-path", "absent"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
