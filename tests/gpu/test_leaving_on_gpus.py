"""Ranks whose scripts hold CUDA graphs of their own with NCCL's calls end when the script does: NCCL would wait for the graphs for ever."""

import os
import subprocess
import sys
from pathlib import Path

import gpu_ranks
import pytest

pytestmark = pytest.mark.gpu

SCRIPT = """
import sys

import torch
import torch.distributed as dist

import hora

hora.init()
values = torch.ones(1024, device="cuda")
dist.all_reduce(values)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    sums = values * 2
    dist.all_reduce(sums)
graph.replay()
torch.cuda.synchronize()
if sys.argv[1] == "fails":
    raise KeyError("after the capture")
"""
SOON_S = 100.0


@gpu_ranks.needs_two_gpus
@pytest.mark.parametrize(("ends", "code"), [("fails", 1), ("well", 0)])
def test_a_script_ends_that_holds_a_graph_with_sums(tmp_path: Path, ends: str, code: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "hora", "run", "-np", "2", str(script), ends],
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
        env=os.environ | {"HORA_STATE_DIR": str(tmp_path / "state")},
    )
    assert done.returncode == code, done.stderr
    assert ("after the capture" in done.stderr) == (ends == "fails")
