"""Has `import horovod.torch` give `hora.hvd`, for scripts that are not to be changed.

`hora run --horovod script.py` sets it up for all ranks; elsewhere call `install` before the script imports Horovod.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from typing_extensions import override

from hora.hvd.running import run

VERSION = "0.28.1"
"""Of the Horovod whose API this is."""

_MODULES = {
    "horovod.torch": "hora.hvd",
    "horovod.torch.mpi_ops": "hora.hvd.mpi_ops",
    "horovod.torch.compression": "hora.hvd.compression",
    "horovod.torch.functions": "hora.hvd.functions",
    "horovod.torch.optimizer": "hora.hvd.optimizer",
    "horovod.torch.sync_batch_norm": "hora.hvd.sync_batch_norm",
    "horovod.torch.elastic": "hora.hvd.elastic",
    "horovod.torch.elastic.sampler": "hora.hvd.elastic.sampler",
    "horovod.torch.elastic.state": "hora.hvd.elastic.state",
    "horovod.common.elastic": "hora.hvd.elastic",
    "horovod.common.exceptions": "hora.hvd.exceptions",
    "horovod.common.process_sets": "hora.hvd.process_sets",
    "horovod.common.util": "hora.hvd.util",
    "horovod.runner": "hora.hvd.running",
}
_PACKAGES = ("horovod", "horovod.common")


def install() -> None:
    """Answers imports of `horovod.torch` and of what is below it from now on; again does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    @override
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname in _PACKAGES:
            return ModuleSpec(fullname, _Package(), is_package=True)
        if fullname in _MODULES:
            return ModuleSpec(fullname, _Alias(_MODULES[fullname]))
        if fullname.startswith("horovod."):
            there = ", ".join(sorted(_MODULES))
            raise ModuleNotFoundError(f"{fullname} is not there: hora answers for Horovod's PyTorch API, which is {there}", name=fullname)
        return None


class _Package(Loader):
    """A package with nothing of its own but `horovod.run`."""

    @override
    def exec_module(self, module: Any) -> None:
        module.__version__ = VERSION
        if module.__name__ == "horovod":
            module.run = run


class _Alias(Loader):
    """A module that is another one.

    Args:
        target: the name of that.
    """

    def __init__(self, target: str) -> None:
        self._target = target

    @override
    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(self._target)
