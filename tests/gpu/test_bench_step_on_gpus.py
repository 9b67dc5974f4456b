"""`hora bench step` with its CUDA graphs, on tiny models: what is captured makes the updates of one process too."""

import json

import pytest

from hora.cli.main import main
from hora.diag.steps.request import VARIANTS, is_captured


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workload", ["lstm_small_adamw", "mlp", "transformer_nmt", "gpt2_1"])
def test_all_variants_do_the_work_and_graphs_count(workload, tmp_path):
    compiled = [name for name in VARIANTS if "compiled" in name]
    variants = [name for name in VARIANTS if workload == "mlp" or name not in compiled]
    words = ["--workloads", workload, "--variants", ",".join(variants), "--tiny", "--rounds", "1", "--steps", "2"]
    assert main(["bench", "step", *words, "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["variant"] for row in rows if row["captured"]] == [name for name in variants if is_captured(name)]
    assert all(row["difference"] <= row["tolerance"] and row["peak_mb"] is not None for row in rows)
