"""The random number generators of this process as a tree that a checkpoint can hold.

Python's `random`, NumPy's global generator when NumPy is loaded, torch's on the CPU and the one of this rank's GPU. Other GPUs are not
touched, so that no memory is taken on them. Worker processes of a data loader are seeded by the loader.
"""

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from hora.errors import CheckpointMismatch


def capture_generators(device: torch.device) -> dict[str, Any]:
    """The state of the generators: numbers, lists and `uint8` tensors, a few kilobytes."""
    version, state, gauss = random.getstate()
    tree: dict[str, Any] = {"python": {"version": version, "state": list(state), "gauss": gauss}, "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        tree["numpy"] = _capture_numpy()
    if device.type == "cuda":
        tree["cuda"] = torch.cuda.get_rng_state(device)
    return tree


def restore_generators(tree: Mapping[str, Any], device: torch.device) -> None:
    """Sets the generators to what `capture_generators` found.

    A GPU's state is left alone when the run goes on without one.

    Raises:
        CheckpointMismatch: the state is that of another Python or NumPy generator.
    """
    python = tree["python"]
    try:
        random.setstate((python["version"], tuple(python["state"]), python["gauss"]))
        if "numpy" in tree:
            _restore_numpy(tree["numpy"])
        torch.set_rng_state(tree["torch"])
        if device.type == "cuda" and "cuda" in tree:
            torch.cuda.set_rng_state(tree["cuda"], device)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointMismatch(f"the state of a random number generator does not fit this version: {error}") from error


def _capture_numpy() -> dict[str, Any]:
    import numpy as np

    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {"name": name, "keys": np.asarray(keys).tolist(), "position": position, "has_gauss": has_gauss, "gauss": gauss}


def _restore_numpy(tree: Mapping[str, Any]) -> None:
    import numpy as np

    np.random.set_state((tree["name"], np.array(tree["keys"], dtype=np.uint32), tree["position"], tree["has_gauss"], tree["gauss"]))
