"""The one private autograd call that Hora needs: being told when a backward pass that it did not start has ended.

PyTorch's own DistributedDataParallel and FSDP use the same call. Where it is missing, `at_end_of_backward` says so and gradients of a plain
`loss.backward()` are summed in `step()` instead.
"""

from collections.abc import Callable
from typing import Any

import torch


def at_end_of_backward(callback: Callable[[], None]) -> bool:
    """Calls `callback` when the backward pass that runs now has ended; must be called from a hook of that pass. False if it cannot be done."""
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None or not hasattr(engine, "queue_callback"):
        return False
    engine.queue_callback(callback)
    return True
