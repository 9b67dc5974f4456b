"""Ends a launcher that was started in a process of its own, with all its ranks."""

import subprocess
from contextlib import suppress


def end_launcher(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Ends `hora run`, if it is still there: it has `grace_s` (which it was told with `--grace`) to end its ranks, and as long for itself."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(2 * grace_s)
            return
        process.kill()  # the launcher's guardian ends the ranks
        process.wait()
