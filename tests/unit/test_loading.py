import gc
import sys
from pathlib import Path

import pytest

from hora.loading import load


@pytest.mark.parametrize("collecting", [True, False])
def test_nothing_is_collected_while_a_module_loads(collecting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large_module.py").write_text("import gc\nwas_enabled = gc.isenabled()\n")
    (tmp_path / "broken_module.py").write_text("raise ImportError('broken')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    if not collecting:
        gc.disable()
    try:
        frozen = gc.get_freeze_count()
        load("large_module")
        assert gc.isenabled() is collecting
        with pytest.raises(ImportError, match="broken"):
            load("broken_module")
        assert gc.isenabled() is collecting
        assert gc.get_freeze_count() > frozen
        assert not sys.modules["large_module"].was_enabled
    finally:
        gc.enable()
        sys.modules.pop("large_module", None)


def test_what_is_there_already_is_left_alone() -> None:
    frozen = gc.get_freeze_count()
    load("sys")
    assert gc.get_freeze_count() == frozen
