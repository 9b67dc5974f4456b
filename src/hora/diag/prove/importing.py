"""Begins recording in a process once it has imported torch; a process that never does pays nothing.

Called by `site/sitecustomize.py` when Python starts. Standard library only.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from hora import env


def install() -> None:
    """Has recording begin after the first `import torch`, if this process was started by `hora prove`."""
    if env.PROVE in os.environ:
        sys.meta_path.insert(0, _AfterTorch())


class _AfterTorch(MetaPathFinder):
    """Gives `torch` a loader that begins recording afterwards; the import itself is everybody else's."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002
        """The spec that the other finders give."""
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RecordingLoader(spec.loader)
        return spec


class _RecordingLoader(Loader):
    def __init__(self, loader: Loader):
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        from hora.diag.prove.recorder import start

        start()
