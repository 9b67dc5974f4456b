"""Ranks on hand for tests: forked once, joined into a job, given one body after the other.

After a failure the ranks are ended and new ones are forked, so that a test cannot spoil the next.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hora.testing import bodies
from hora.testing.outcomes import Outcome, RanksFailed, gather, report
from hora.testing.process import Rank, Zygote

_INIT_TIMEOUT_S = 60.0


class RankPool:
    """`world_size` ranks that have joined a job, each on its node of `nodes`."""

    def __init__(self, zygote: Zygote, world_size: int, how: Mapping[str, Any], nodes: Sequence[int] | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hora-ranks-")
        self.ranks: dict[int, Rank] = {number: zygote.fork() for number in range(world_size)}
        init_method = f"file://{Path(self._directory.name) / 'store'}"
        for number, rank in self.ranks.items():
            place = {"rank": number, "world_size": world_size} if nodes is None else {}
            environ = {} if nodes is None else place_on_node(number, nodes)
            rank.ask({"environ": environ, "init": {"init_method": init_method, **place, **how}})
        outcomes = gather(self.ranks, _INIT_TIMEOUT_S)
        if any(outcome.kind != "passed" for outcome in outcomes):
            self.close()
            raise RanksFailed(f"the ranks could not join:\n{report(outcomes)}")

    def run(self, body: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float) -> list[Outcome]:
        """Runs `body` on all ranks; what became of it on each, by rank."""
        request = {"body": bodies.describe(body), "arguments": bodies.encode_arguments(arguments), "sys_path": sys.path}
        for rank in self.ranks.values():
            rank.ask(request)
        return gather(self.ranks, timeout_s)

    def close(self) -> None:
        """Ends the ranks."""
        for rank in self.ranks.values():
            rank.close()
        self._directory.cleanup()


def place_on_node(rank: int, nodes: Sequence[int]) -> dict[str, str]:
    """The variables of a launcher that has put `rank` on its node of `nodes`, where in truth there is one."""
    local = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": len(nodes),
        "LOCAL_RANK": local.index(rank),
        "LOCAL_WORLD_SIZE": len(local),
        "GROUP_RANK": nodes[rank],
        "GROUP_WORLD_SIZE": len(set(nodes)),
    }
    return {"TORCHELASTIC_RUN_ID": "nodes"} | {name: str(number) for name, number in numbers.items()}


class RankPools:
    """A pool for each world size and way of joining, made when first asked for and kept while it works."""

    def __init__(self) -> None:
        self.zygote = Zygote()
        self._pools: dict[tuple[Any, ...], RankPool] = {}

    def run(
        self,
        body: Callable[..., Any],
        arguments: Mapping[str, Any],
        *,
        world_size: int,
        how: Mapping[str, Any],
        nodes: Sequence[int] | None = None,
        timeout_s: float,
    ) -> list[Outcome]:
        """Runs `body` on `world_size` ranks; `how` is what else `hora.init` is given, `nodes` as in `run_ranks`.

        Returns:
            What became of it on each rank.

        Raises:
            RanksFailed: the ranks could not even join.
        """
        key = (world_size, nodes, *sorted(how.items()))
        if key not in self._pools:
            self._pools[key] = RankPool(self.zygote, world_size, how, nodes)
        outcomes = self._pools[key].run(body, arguments, timeout_s)
        if not all(outcome.clean or outcome.kind == "skipped" for outcome in outcomes):
            self._pools.pop(key).close()
        return outcomes

    def close(self) -> None:
        """Ends all ranks and the zygote."""
        while self._pools:
            self._pools.popitem()[1].close()
        self.zygote.close()
