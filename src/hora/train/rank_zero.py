"""What rank 0 does for all, and whose outcome all share: no rank goes on where another has failed."""

from collections.abc import Callable
from typing import Any, TypeVar

from hora import errors
from hora.comm.objects import broadcast_object
from hora.comm.session import rank
from hora.errors import HoraError

T = TypeVar("T")


def on_rank_zero(act: Callable[[], T]) -> T:
    """Lets rank 0 do `act` and gives its result to every rank.

    Collective: all ranks call it.

    Args:
        act: is called on rank 0 only and must not use collectives; its result is plain data (see `hora.broadcast_object`).

    Raises:
        HoraError: what `act` raised, on every rank alike; an error that is none of Hora's arrives on the other ranks as a `HoraError`.
    """
    error: Exception | None = None
    outcome: dict[str, Any] = {}
    if rank() == 0:
        try:
            outcome = {"result": act()}
        except Exception as caught:
            error, outcome = caught, _describe(caught)
    outcome = broadcast_object(outcome)
    if error is not None:
        raise error
    if "kind" in outcome:
        raise _error_class(outcome["kind"])(outcome["message"])
    result: T = outcome["result"]
    return result


def _describe(error: Exception) -> dict[str, str]:
    if isinstance(error, HoraError):
        return {"kind": type(error).__name__, "message": str(error)}
    return {"kind": "HoraError", "message": f"rank 0 failed: {error!r}"}


def _error_class(name: str) -> type[HoraError]:
    found = getattr(errors, name, HoraError)
    return found if isinstance(found, type) and issubclass(found, HoraError) else HoraError
