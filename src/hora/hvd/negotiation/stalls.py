"""What is said of operations for which ranks are missing. Pure."""

from collections.abc import Sequence

from hora.comm.records import say_ranks
from hora.hvd.negotiation.coordinator import Stalled

_MOST_NAMES = 6


def say_warning(stalled: Sequence[Stalled], after_s: float) -> str:
    """Horovod's words, and by rank what it has not announced."""
    return (
        "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for "
        f"more than {after_s:g} seconds. This may indicate that different ranks are trying to submit different tensors or that only subset of "
        f"ranks is submitting tensors, which will cause deadlock.\n{say_missing(stalled)}"
    )


def say_end(stalled: Sequence[Stalled], after_s: float) -> str:
    """Why all ranks end."""
    return (
        f"One or more ranks did not submit tensors that others wait for within {after_s:g} seconds (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS).\n"
        f"{say_missing(stalled)}"
    )


def missing_ranks(stalled: Sequence[Stalled]) -> tuple[int, ...]:
    """All that are waited for."""
    return tuple(sorted({rank for one in stalled for rank in one.missing}))


def say_missing(stalled: Sequence[Stalled]) -> str:
    """`Missing ranks:`, and a line for each with the tensors."""
    names: dict[int, list[str]] = {}
    for one in stalled:
        for rank in one.missing:
            names.setdefault(rank, []).append(one.key[1])
    lines = [
        f"{rank}: [{', '.join(found[:_MOST_NAMES])}{' ...' if len(found) > _MOST_NAMES else ''}]" for rank, found in sorted(names.items())
    ]
    waiting = sorted({rank for one in stalled for rank in one.ready})
    return "\n".join(["Missing ranks:", *lines, f"Waiting: {say_ranks(waiting)}, for {max(one.waited_s for one in stalled):.0f} s."])
