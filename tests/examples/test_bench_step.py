"""`hora bench step` as a user calls it, on models so small that it takes seconds."""

import json

import pytest

from hora.cli.main import main


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workloads", "variants"),
    [
        ("lstm_small,lstm_small_adamw,mlp,gpt2_8", "single,per-parameter,fused,ddp,ddp-best,deferred,overlap,sharded,fsdp2"),
        ("resnet50,transformer_nmt", "ddp,overlap,fsdp2"),
    ],
)
def test_rows_of_all_variants(workloads, variants, tmp_path, capsys):
    words = ["--workloads", workloads, "--variants", variants, "--tiny", "--rounds", "1", "--steps", "1"]
    assert main(["bench", "step", *words, "--json", str(tmp_path / "rows.json"), "--png", str(tmp_path / "steps.png")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["workload"], row["variant"]) for row in rows] == [(w, v) for w in workloads.split(",") for v in variants.split(",")]
    assert all(row.keys() >= {"workload", "variant", "ranks", "ms", "spread", "peak_mb", "efficiency", "captured"} for row in rows)
    assert all(row["ms"] > 0 and row["items_per_s"] > 0 and row["ranks"] == 2 and not row["captured"] for row in rows)
    assert all(row["difference"] <= row["tolerance"] for row in rows)
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    assert "x of first" in capsys.readouterr().out


def test_mistakes_are_refused_before_anything_starts(monkeypatch, capsys):
    monkeypatch.setattr("hora.diag.steps.command.start_ranks", lambda *_: pytest.fail("ranks were started"))
    assert main(["bench", "step", "--variants", "fast"]) == 2
    assert 'unknown variant "fast"' in capsys.readouterr().err
    assert main(["bench", "step", "--png", "/nowhere/steps.png"]) == 2
    assert "cannot write /nowhere/steps.png" in capsys.readouterr().err
