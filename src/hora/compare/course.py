"""A comparison from its request to its outcomes: training runs in turns, one job for what trains alone and one for all ranks in each round.

What takes part in a round begins with another variant each time, so that a slow minute of the machine falls on all alike.
"""

from collections.abc import Callable, Mapping
from typing import Any

from hora.compare.request import REFERENCE, TWIN, Request, is_alone
from hora.compare.result import Outcome, conclude
from hora.diag.bench.registry import rotated
from hora.diag.ranks import start_ranks

Starter = Callable[[str, str, int, Callable[[dict[str, Any]], None]], None]
"""As `hora.diag.ranks.start_ranks`."""


def compare(request: Request, say: Callable[[str], None], starter: Starter = start_ranks) -> list[Outcome]:
    """Trains everything, and tells `say` what is going on.

    Raises:
        HoraError: ranks have failed.
    """
    points: dict[str, list[Mapping[str, Any]]] = {variant: [] for variant in (*request.variants, TWIN)}
    alone = [variant for variant in request.variants if is_alone(variant)]
    together = [variant for variant in request.variants if not is_alone(variant)]

    def told(point: dict[str, Any]) -> None:
        points[point["variant"]].append(point)
        if point["variant"] != TWIN:
            say(f"  {point['variant']}: {sum(point['seconds']):.1f} s, loss {point['loss']:.4f}")

    for repeat in range(request.repeats):
        say(f"run {repeat + 1} of {request.repeats}")
        first = [*rotated(alone, repeat), *[TWIN] * (repeat == 0)]
        starter("hora.compare", request.of(first).dump(), 1, told)
        if together:
            starter("hora.compare", request.of(rotated(together, repeat)).dump(), request.ranks, told)
    assert len(points[REFERENCE]) == request.repeats
    return conclude(points, points[TWIN][0], request)
