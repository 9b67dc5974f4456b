"""Exit codes that say whether another start could end otherwise."""

import subprocess
import sys

import pytest

from hora import errors, exits


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError(), 2),
        (errors.CheckpointMismatch(), 2),
        (errors.CheckpointIncomplete(), 1),
        (errors.PeerLost(), 1),
        (ValueError(), 1),
    ],
)
def test_an_error_has_the_code_of_what_another_start_would_meet(error: Exception, code: int) -> None:
    assert exits.code_after(error) == code


@pytest.mark.parametrize(("under_launcher", "code"), [(True, 2), (False, 1)])
def test_python_ends_with_that_code_under_the_launcher(under_launcher: bool, code: int) -> None:
    """After the traceback and what is to be done at exit, and only there: an interactive Python must not end with its first mistake."""
    body = (
        f"import atexit, os\nos.environ.pop('HORA_JOB_ID', None)\nif {under_launcher}:\n    os.environ['HORA_JOB_ID'] = 'job'\n"
        "import hora\natexit.register(print, 'left in order')\nraise hora.errors.ConfigError('wrong')\n"
    )
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "left in order\n")
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("hora.errors.ConfigError: wrong\n")


# Another hook that collects what is printed, as that of torch.distributed.
COLLECTING = """\
import io, os, sys
os.environ["HORA_JOB_ID"] = "job"
import hora
below = sys.excepthook
def collect(*args):
    out, sys.stderr = sys.stderr, io.StringIO()
    try:
        below(*args)
    finally:
        said, sys.stderr = sys.stderr.getvalue(), out
    sys.stderr.write("collected: " + said)
sys.excepthook = collect
if {again}:
    hora.exits.tell_launcher()
raise hora.errors.ConfigError("wrong")
"""


@pytest.mark.parametrize(("again", "code"), [(False, 1), (True, 2)])
def test_another_hook_prints_what_it_would(again: bool, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTING.format(again=again)], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert done.stderr.startswith("collected: Traceback")
    assert done.stderr.count("hora.errors.ConfigError: wrong") == 1
