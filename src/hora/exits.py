"""With what code a process ends that an error ends: launchers do not start anew after what could only repeat itself.

Python ends with 1 after any error. A rank of Hora's launcher ends with `WRONG` after one that the next start would meet again, whether the
error reaches Python (`tell_launcher`) or a command of Hora's.
"""

import sys
from types import TracebackType

from hora.errors import CheckpointMismatch, ConfigError

FAILED = 1
"""Something went wrong that another start may not meet again."""

WRONG = 2
"""What the user gave is wrong, as for programs that were given wrong arguments: the next start would end in the same way."""


def code_after(error: BaseException) -> int:
    """The exit code of a process that `error` ends."""
    return WRONG if isinstance(error, ConfigError | CheckpointMismatch) else FAILED


def tell_launcher() -> None:
    """From now on an error that ends this process is told by the exit code, too, after it has been printed as before.

    To be called again when another hook for errors may have been put over this one, as torch.distributed does when a group begins.
    """
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        # Not below another hook, which would not come to print what it has collected.
        if sys.excepthook is hook and code_after(error) != FAILED:
            raise SystemExit(code_after(error))  # which Python heeds here, and ends as it would have

    sys.excepthook = hook
