"""Runs where tests start Python: such a process looks for garbage neither while it imports torch nor, ever after, among what that has made.

A third of what it costs to start a rank and to end it is that search, among objects of torch that are none. All that is made later is
collected as always, at the end of the process too. `tests/conftest.py` puts this directory on PYTHONPATH.
"""

import gc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Torch:
    """Finds `torch` as the other finders do, and has its loader begin and end as said above."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_uncollected(module: ModuleType) -> None:
            gc.disable()
            try:
                load(module)
            finally:
                gc.freeze()
                gc.enable()

        spec.loader.exec_module = load_uncollected
        return spec


sys.meta_path.insert(0, _Torch())
