"""What a rank does for `hora.run`: `python -m hora.calls.rank DIRECTORY` calls the function and leaves its result there, or its exception."""

import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

from hora.calls import functions
from hora.calls.files import read_object, write_object
from hora.calls.request import Failure, Request, arguments_path, result_path


def main(directory: Path) -> int:
    """Calls the function; returns the exit code of this rank."""
    rank = int(os.environ["RANK"])
    request = Request.read(directory)
    sys.path[:] = list(request.sys_path)
    try:
        function = functions.find(request.function)
        arguments = read_object(arguments_path(directory))
        result = function(*arguments["args"], **arguments["kwargs"])
        write_object(result_path(directory, rank), result, f"the result on rank {rank}")
    except Exception as error:
        trace = "".join(traceback.format_exception(error.with_traceback(_of_function(error)))).rstrip()
        Failure(f"{type(error).__name__}: {error}", trace).write(directory, rank)
        # On standard error as well, from which the launcher tells whose failure was the first.
        print(trace, file=sys.stderr, flush=True)  # noqa: T201
        return 1
    return 0


def _of_function(error: BaseException) -> TracebackType | None:
    """The traceback without this module's own frame, unless nothing else is in it."""
    return error.__traceback__.tb_next or error.__traceback__ if error.__traceback__ else None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
