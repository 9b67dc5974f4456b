"""Where an interpreter that is started as a spare waits: Python loads this module at its start, before it looks at what it is to run.

The interpreter has the command of a rank and goes on to run it when this module is done; nothing of what a script sees of its start has to be
imitated. The way to this module is removed from the path and the environment, and the `sitecustomize` that the machine may have takes its place.
Relies on the standard library alone until that is done.
"""

import importlib
import os
import sys


def _cover_tracks() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    if sys.path[:1] == [here]:
        del sys.path[0]
    sys.path_importer_cache.pop(here, None)
    rest = os.environ.pop("PYTHONPATH", "").partition(os.pathsep)[2]
    if rest:
        os.environ["PYTHONPATH"] = rest
    del sys.modules[__name__]


def _load_real() -> Exception | None:
    """Loads the module whose name this one has taken; returns what Python would make of its fault, or of there being none."""
    try:
        importlib.import_module(__name__)
    except Exception as error:
        return error
    return None


_cover_tracks()
_problem = _load_real()
try:
    from hora.launch import spare

    spare.serve()
except BaseException:  # it must not run what it was not told to
    os._exit(1)
if _problem is not None:
    raise _problem
