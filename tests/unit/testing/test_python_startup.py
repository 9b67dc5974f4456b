"""How processes of Python begin that tests start."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hora.testing import run_ranks

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


COMPILED = """\
import sys
from types import ModuleType

import torch

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
inputs = torch.ones(3, 2)
model(inputs).sum().backward()
optimizer.step()
late = torch._dynamo
assert [name for name in sys.modules if name.startswith("torch._dynamo.")] == []

twice = torch._dynamo.disable(lambda number: 2 * number)
assert twice(2) == 4
assert not hasattr(late, "no_such_name")  # it is executed to know that
assert torch._dynamo is late
assert type(late) is ModuleType
assert late.disable.__module__.startswith("torch._dynamo.")
assert twice(3) == 6

expected = model(inputs)
traced = torch.compile(model, backend="eager", fullgraph=True)(inputs)
assert torch.equal(traced, expected)
optimizer.step()
"""

DECORATOR = """\
import torch._dynamo

@torch._dynamo.disable(recursive=False)
def twice(number):
    return 2 * number

assert twice(2) == 4
assert torch._dynamo.disable.__module__.startswith("torch._dynamo.")
"""

PART = """\
from torch._dynamo import config
import torch._dynamo.config

assert torch._dynamo.config is config
"""


@pytest.mark.parametrize("code", [COMPILED, DECORATOR, PART], ids=["compiled", "decorator", "part"])
def test_dynamo_is_executed_once_something_is_asked_of_it(code: str) -> None:
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


@run_ranks(1)
def test_forked_ranks_have_all_of_dynamo(world_size: int) -> None:
    assert type(sys.modules["torch._dynamo"]) is ModuleType
    assert "torch._dynamo.eval_frame" in sys.modules
