"""What the kernel tells of the processes of ranks."""

import signal
import subprocess
import sys

import pytest

from hora.launch.local import catches


@pytest.mark.parametrize(
    ("disposition", "caught"),
    [("signal.SIG_DFL", False), ("signal.SIG_IGN", False), ("lambda *_: None", True)],
)
def test_a_handler_for_a_signal_is_seen(disposition: str, caught: bool) -> None:
    program = f"import signal, sys; signal.signal(signal.SIGUSR1, {disposition}); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert catches(process.pid, signal.SIGUSR1) is caught
        assert not catches(process.pid, signal.SIGTERM)
        process.kill()
    assert not catches(process.pid, signal.SIGUSR1)
