"""`@run_ranks`: a test whose body runs on several real ranks."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hora.errors import ConfigError
from hora.testing.bodies import BODY
from hora.testing.outcomes import report
from hora.testing.pool import RankPools

DEFAULT_TIMEOUT_S = 60.0


def run_ranks(
    *world_sizes: int, backend: str | None = None, nodes: Sequence[int] | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a pytest test of a function that is to run on each of so many ranks, once for each of `world_sizes`.

    The body runs in other processes, in which `hora.init` has been called: on CPUs, or on GPUs with `backend="nccl"` (the test is then marked
    `gpu`). It is found by name, so it stands at the top of its module. Its parameters come from `pytest.mark.parametrize` or from fixtures
    and travel as JSON (numbers, strings, None, lists, dicts, and paths, such as `tmp_path`; tuples arrive as lists); a parameter `world_size`
    is the number of ranks. Random seeds are set to 0 and warnings are errors, as in the test process.

    A failed assert, a rank that dies, one that hangs, and an exception in a thread of a rank are each reported as what they are, with the
    rank, its traceback and what it printed. The ranks are reused by the tests that follow, unless something went wrong.

    Args:
        world_sizes: numbers of ranks, such as 1, 2, 3, 4.
        backend: of `hora.init`.
        nodes: the node of each rank, for ranks that are to believe that they stand on several, such as `(0, 1, 0, 1)`; with that one world size.
        timeout_s: after how many seconds a body that still runs has hung.
    """
    how: dict[str, Any] = {"backend": backend, "device": "cuda" if backend == "nccl" else "cpu"}
    if nodes is not None and world_sizes != (len(nodes),):
        raise ConfigError(f"nodes must name the node of each of {world_sizes} ranks, but are {nodes} instead")

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        parameters = list(inspect.signature(body).parameters)

        def test(rank_pools: RankPools, world_size: int, **arguments: Any) -> None:
            if "world_size" in parameters:
                arguments["world_size"] = world_size
            outcomes = rank_pools.run(body, arguments, world_size=world_size, how=how, nodes=nodes, timeout_s=timeout_s)
            if any(outcome.bad for outcome in outcomes):
                pytest.fail(report(outcomes), pytrace=False)
            if any(outcome.kind == "skipped" for outcome in outcomes):
                pytest.skip(report(outcomes))

        _dress(test, body, ["rank_pools", "world_size", *(name for name in parameters if name != "world_size")])
        marked: Callable[..., None] = pytest.mark.parametrize("world_size", world_sizes)(test)
        return pytest.mark.gpu(marked) if backend == "nccl" else marked

    return decorate


def _dress(test: Callable[..., None], body: Callable[..., None], parameters: list[str]) -> None:
    """Gives `test` the name and marks of `body` and the parameters that pytest must supply."""
    test.__name__, test.__qualname__, test.__module__, test.__doc__ = body.__name__, body.__qualname__, body.__module__, body.__doc__
    test.__dict__.update(body.__dict__, **{BODY: body})
    keyword = inspect.Parameter.KEYWORD_ONLY
    test.__signature__ = inspect.Signature([inspect.Parameter(name, keyword) for name in parameters])  # type: ignore[attr-defined]
