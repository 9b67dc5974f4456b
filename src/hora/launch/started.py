"""A launcher in a process of its own: started with the words of `hora run`, ended with all its ranks, and not outliving who started it.

For programs that start ranks and are no launcher themselves: `hora.run`, the benches, `hora prove`.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from hora.launch.child import preparation

Stream = IO[bytes] | int | None


def end_when_asked() -> None:
    """From now on SIGTERM, and a terminal that hangs up, end this process as an error does: what it has started with it, and its temporary files.

    What was ignored (`nohup`) stays ignored. For commands whose jobs are other processes; a launcher has its own way.
    """
    for signum in (getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda signum, _: sys.exit(128 + signum))


@contextmanager
def launcher(
    words: Sequence[str], *, grace_s: float, environ: Mapping[str, str] | None = None, stdout: Stream = None, stderr: Stream = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs `hora run` with `words` inside the `with` block, at whose end it and its ranks are ended, if they have not ended by themselves.

    On Linux they also end when this process does, or the thread that entered the block.

    Args:
        words: options and target.
        grace_s: how long ranks may take to end when they are asked to.
        environ: variables of the launcher and the ranks; None: those of this process.
        stdout: where output goes, as for `subprocess.Popen`.
        stderr: where errors go.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "hora.launch", "--grace", f"{grace_s:g}", *words],
        env=environ, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, preexec_fn=preparation(os.getpid()),
    )  # fmt: skip
    try:
        yield process
    finally:
        _end(process, grace_s)


def _end(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(2 * grace_s)
            return
        process.kill()  # the launcher's guardian ends the ranks
        process.wait()
