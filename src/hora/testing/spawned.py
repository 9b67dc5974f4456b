"""Ranks of a single test, for tests that kill, stop or otherwise spoil them."""

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from hora.comm.deadline import Deadline
from hora.testing import bodies
from hora.testing.outcomes import Outcome, RanksFailed, gather, hear, report
from hora.testing.process import Rank, Zygote


class SpawnedRanks:
    """Fresh processes that run one body and are never used again. Use as a context manager: all are dead afterwards.

    Args:
        zygote: what they are forked from.
        world_size: how many.
        body: function at the top of a module; called on each rank, with `arguments`.
        arguments: JSON or paths.
        join: whether hora.init has been called when the body begins.
        environ: variables to set in each rank first; HORA_FAULT arms faults.
        init: what else hora.init is given; by default ranks are on CPUs.
    """

    def __init__(
        self,
        zygote: Zygote,
        world_size: int,
        body: Callable[..., Any],
        arguments: Mapping[str, Any],
        *,
        join: bool = True,
        environ: Mapping[str, str] | None = None,
        init: Mapping[str, Any] | None = None,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hora-ranks-")
        self.ranks: dict[int, Rank] = {number: zygote.fork() for number in range(world_size)}
        request = {
            "environ": dict(environ or {}),
            "body": bodies.describe(body),
            "arguments": bodies.encode_arguments(arguments),
            "sys_path": sys.path,
        }
        how = {"init_method": f"file://{Path(self._directory.name) / 'store'}", "world_size": world_size, "device": "cpu"} | dict(
            init or {}
        )
        for number, rank in self.ranks.items():
            rank.ask(request | ({"init": how | {"rank": number}} if join else {}))

    def await_event(self, number: int, event: str, timeout_s: float = 30.0) -> None:
        """Waits until rank `number` has told `event` (`hora.testing.tell`).

        Raises:
            RanksFailed: it ended without, or did not in time.
        """
        rank, deadline = self.ranks[number], Deadline(timeout_s)
        while event not in rank.events:
            if rank.answer is not None or deadline.passed:
                raise RanksFailed(f"rank {number} has not told {event!r} after {timeout_s:.0f} s:\n{report(gather({number: rank}, 0.0))}")
            hear({number: rank}, deadline.remaining_s)

    def signal(self, number: int, signal_number: int) -> None:
        """Sends a signal to rank `number`."""
        self.ranks[number].signal(signal_number)

    def wait(self, timeout_s: float = 30.0, *, but: int | None = None) -> list[Outcome]:
        """Waits until the body has ended on all ranks; what became of it on each, by rank.

        Ranks that still run at the deadline, or shortly after another one has failed, are killed.

        Args:
            timeout_s: deadline in seconds.
            but: a rank not to wait for, such as one that was stopped.
        """
        return gather({number: rank for number, rank in self.ranks.items() if number != but}, timeout_s)

    def __enter__(self) -> "SpawnedRanks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None) -> None:
        for rank in self.ranks.values():
            rank.close()
        self._directory.cleanup()
