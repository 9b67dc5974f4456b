"""`hora compare` as a user calls it, on a model so small that it takes seconds."""

import json

import pytest

from hora.cli.main import main

SETTINGS = ("data.global_batch_size=5", "data.synthetic.samples=64", "data.synthetic.size=16", "optimizer.lr=0.05")


@pytest.mark.slow
def test_a_comparison_shows_what_all_take_and_who_trains_something_else(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hora[plot]'")
    words = [
        "--config",
        "mnist",
        "--data",
        "synthetic",
        *(word for setting in SETTINGS for word in ("--set", setting)),
        "--steps",
        "24",
        "--repeats",
        "1",
    ]
    files = {kind: tmp_path / f"compare.{kind}" for kind in ("json", "png", "html")}
    words += [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    assert main(["compare", "image", *words, "--device", "cpu", "--nproc", "2"]) == 0
    rows = {row["variant"]: row for row in json.loads(files["json"].read_text())}
    assert list(rows) == ["single", "per-parameter", "deferred", "ddp", "overlap", "sharded"]
    # Of 5 images one rank has 3 and the other 2.
    assert {variant for variant, row in rows.items() if not row["agrees"]} == {"ddp"}
    assert rows["ddp"]["difference"] > 10 * rows["overlap"]["difference"]
    assert all(row["value"] > 0 and len(row["samples"]) == 1 and row["steps"] == 18 for row in rows.values())
    assert all(0 <= rows[variant]["waiting"] < 1 for variant in rows if variant != "single")
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "horovod was left out" in files["html"].read_text()
    shown = capsys.readouterr().out
    assert "captured was left out: a CUDA graph needs GPUs" in shown
    assert "ddp does not train the same model" in shown


def test_training_that_diverges_is_told_in_a_sentence_with_the_variant(capfd):
    words = [word for setting in (*SETTINGS, "optimizer.lr=1e30") for word in ("--set", setting)]
    command = [
        "compare",
        "image",
        "--config",
        "mnist",
        "--data",
        "synthetic",
        *words,
        "--steps",
        "4",
        "--repeats",
        "1",
        "--variants",
        "single",
    ]
    assert main([*command, "--device", "cpu", "--nproc", "2"]) == 1
    told = capfd.readouterr().err
    assert "hora: single was ended: the loss must be finite, but is not in one of the last " in told
    assert "images of training" in told
    assert "Traceback" not in told
