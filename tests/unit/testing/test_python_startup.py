"""How processes of Python begin that tests start."""

import subprocess
import sys
from pathlib import Path

TORCH = """\
import gc

collecting = gc.isenabled()
made = [[] for _ in range(1000)]
"""

SCRIPT = """\
import gc

frozen = gc.get_freeze_count()
import torch

assert (frozen, torch.collecting, gc.isenabled()) == (0, False, True)
assert not any(found is torch.made for found in gc.get_objects())
mine = []
assert any(found is mine for found in gc.get_objects())
print(type(torch.__loader__).__name__)
"""


def test_what_torch_makes_is_not_looked_through_for_garbage_and_all_else_is(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "script.py").write_text(SCRIPT)
    result = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, "SourceFileLoader\n"), result.stderr
