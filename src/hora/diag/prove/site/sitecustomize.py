"""Put on PYTHONPATH by `hora prove`: begins recording, then runs the sitecustomize that would have been found without it."""

import importlib.machinery
import importlib.util
import os
import sys


def _run_next() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


try:
    from hora.diag.prove.importing import install
except ImportError as error:
    sys.stderr.write(f"hora prove records nothing in this process, whose Python ({sys.executable}) has no hora: {error}\n")
else:
    install()
_run_next()
