"""From the words of the user to the command of a rank: a script, a module, or a program.

Looks into the file system and along Python's path, and runs none of what it finds, so that what is missing is said before anything is
started.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder

from hora.errors import ConfigError
from hora.launch.options import TargetKind


def rank_command(
    target: str, args: Sequence[str], kind: TargetKind, environ: Mapping[str, str] = os.environ, *, mpi: bool = False
) -> list[str]:
    """The command that every rank runs: `target` with `args`, under this Python unless it is a program.

    A "script" that does not end in `.py` and is no file is taken as a module. With `mpi` it finds torch's backend "mpi" in place.

    Raises:
        ConfigError: there is no such thing, or it cannot be read or executed.
    """
    if kind == "program":
        return [_find_program(target, environ), *args]
    python = [sys.executable, "-u", *(["-m", "hora.mpi"] if mpi else [])]
    if kind == "module" or not (target.endswith(".py") or os.path.lexists(target)):
        _check_module(target, environ, asked=kind == "module")
        return [*python, "-m", target, *args]
    _check_script(target)
    return [*python, _no_option(target), *args]


def _check_script(path: str) -> None:
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "__main__.py")):
            raise ConfigError(f"the script {path!r} is a directory without a __main__.py; name a file in it")
    elif not os.path.exists(path):
        raise ConfigError(f"there is no script {path!r} in {os.getcwd()}; check the name")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"the script {path!r} cannot be read; check its permissions")


def _no_option(path: str) -> str:
    """A path that Python does not take for an option."""
    return os.path.join(".", path) if path.startswith("-") else path


def _check_module(name: str, environ: Mapping[str, str], *, asked: bool) -> None:
    """Looks for the outermost package; what is inside it only Python can tell, by importing it."""
    top = name.partition(".")[0]
    if all(part.isidentifier() for part in name.split(".")) and _find_top(top, environ):
        return
    what = f"there is no module {name!r}" if asked else f"{name!r} is neither a file nor a module"
    raise ConfigError(f"{what}: {top!r} is not found from {os.getcwd()} along PYTHONPATH; check the name")


def _find_top(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a rank could import `name`: from the working directory, PYTHONPATH, or what this Python has installed."""
    first = [os.getcwd(), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    if PathFinder.find_spec(name, first) is not None:
        return True
    return any(finder.find_spec(name, None) is not None for finder in sys.meta_path)


def _find_program(name: str, environ: Mapping[str, str]) -> str:
    found = shutil.which(name, path=environ.get("PATH"))
    if found is not None:
        return found
    if os.path.exists(name):
        raise ConfigError(
            f"the program {name!r} is not executable; run `chmod +x {name}`, or leave --no-python out if it is a Python script"
        )
    raise ConfigError(f"there is no program {name!r} in PATH; check the name")
