"""MPI for scripts that call torch.distributed themselves: `import hora.mpi`, and `init_process_group("mpi")` works.

Without a change to the script: `mpiexec -n 4 python -m hora.mpi train.py`, which is also what `hora run --mpi` starts. A script that is run so and
fails on one rank ends the job, where `python train.py` would leave the others waiting for it until their deadline.
"""

import os
import runpy
import sys
from types import TracebackType

from hora.comm.backends.mpi import register
from hora.comm.backends.mpi.library import tell_failure
from hora.errors import HoraError

_USAGE = "usage: mpiexec -n N python -m hora.mpi SCRIPT [ARGS...], or -m MODULE [ARGS...]"


def main(words: list[str]) -> None:
    """Runs a script, or a module after `-m`, as Python would."""
    module = words[:1] == ["-m"]
    target = words[1:] if module else words
    if not target:
        raise SystemExit(_USAGE)
    sys.argv = target
    # As Python does: a script finds what lies beside it, a module what lies in the working directory.
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(target[0]))
    try:
        if module:
            runpy.run_module(target[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            tell_failure()
        raise
    except BaseException as error:
        tell_failure()
        error.__traceback__ = _of_script(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None


def _of_script(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without what runs the script."""
    inner = traceback
    while inner is not None and inner.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        inner = inner.tb_next
    return inner or traceback


try:
    register()
except HoraError as problem:
    if __name__ == "__main__":
        raise SystemExit(f"hora: {problem}") from None
    raise

if __name__ == "__main__":
    main(sys.argv[1:])
