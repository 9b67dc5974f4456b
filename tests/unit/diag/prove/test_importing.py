import os
import subprocess
import sys
from pathlib import Path

import pytest

from hora.diag.prove.run import SITE

PROGRAM = """
import sys
began_without_torch = "torch" not in sys.modules
import json, types, importlib.util
finders = [type(finder).__name__ for finder in sys.meta_path]
print(json.dumps([began_without_torch, "_AfterTorch" in finders, sys.modules["builtins"].__dict__.get("their_sitecustomize_ran", False)]))
"""


def python(tmp_path: Path, program: str, **environ: str) -> str:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.their_sitecustomize_ran = True\n")
    path = os.pathsep.join([str(SITE), str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path} | environ, capture_output=True, text=True, check=True, timeout=60
    ).stdout


@pytest.mark.parametrize("proving", [True, False])
def test_another_sitecustomize_runs_too_and_torch_is_not_imported(proving: bool, tmp_path: Path) -> None:
    environ = {"HORA_PROVE": str(tmp_path), "HORA_PROVE_STEPS": "3"} if proving else {}
    assert python(tmp_path, PROGRAM, **environ) == f"[true, {str(proving).lower()}, true]\n"


def test_recording_begins_when_torch_has_been_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("number = 7\n")
    (tmp_path / "hora").mkdir()
    # A torch and a recorder of one line each: what is tested is when the one calls the other.
    for name, text in {"__init__": "", "env": "PROVE = 'HORA_PROVE'"}.items():
        (tmp_path / "hora" / f"{name}.py").write_text(text)
    (tmp_path / "hora" / "diag" / "prove").mkdir(parents=True)
    for folder in ("diag", "diag/prove"):
        (tmp_path / "hora" / folder / "__init__.py").write_text("")
    (tmp_path / "hora" / "diag" / "prove" / "importing.py").write_text((SITE.parent / "importing.py").read_text())
    (tmp_path / "hora" / "diag" / "prove" / "recorder.py").write_text("import torch\n\ndef start():\n    torch.started = torch.number\n")
    program = "import torch, importlib\nprint(torch.started, type(torch.__loader__).__name__, importlib.reload(torch).number)"
    assert python(tmp_path, program, HORA_PROVE=str(tmp_path)) == "7 SourceFileLoader 7\n"
