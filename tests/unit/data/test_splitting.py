from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from hora.data.splitting import batch_size, part_of
from hora.errors import ConfigError


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


TREES: dict[str, Any] = {
    "tensor": torch.arange(5),
    "list of tensors": [torch.arange(5), torch.arange(10).view(5, 2)],
    "tuple of arrays": (np.arange(5), np.arange(5) * 2),
    "named tuple": Pair(torch.arange(5), torch.arange(5) + 1),
    "nested": {"images": torch.arange(5), "more": [{"labels": torch.arange(5)}, ("a", "b", "c", "d", "e"), "text", 3, None]},
    "texts": ["a", "b", "c", "d", "e"],
    "with a scalar": (torch.arange(5), torch.tensor(3.0)),
    "dict of another kind": defaultdict(list, inputs=torch.arange(5)),
}
PARTS: dict[str, Any] = {
    "tensor": torch.tensor([1, 2]),
    "list of tensors": [torch.tensor([1, 2]), torch.tensor([[2, 3], [4, 5]])],
    "tuple of arrays": (np.array([1, 2]), np.array([2, 4])),
    "named tuple": Pair(torch.tensor([1, 2]), torch.tensor([2, 3])),
    "nested": {"images": torch.tensor([1, 2]), "more": [{"labels": torch.tensor([1, 2])}, ("b", "c"), "text", 3, None]},
    "texts": ["b", "c"],
    "with a scalar": (torch.tensor([1, 2]), torch.tensor(3.0)),
    "dict of another kind": defaultdict(list, inputs=torch.tensor([1, 2])),
}


def equal(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool((left == right).all()) if isinstance(left, Tensor | np.ndarray) else bool(left == right)


@pytest.mark.parametrize("name", TREES)
def test_batches_are_cut_along_their_first_dimension(name: str) -> None:
    assert batch_size(TREES[name]) == 5
    assert equal(part_of(TREES[name], range(1, 3), 5), PARTS[name])
    assert equal(part_of(TREES[name], range(5), 5), TREES[name])


def test_tensors_of_different_lengths_are_refused_naming_them() -> None:
    with pytest.raises(ConfigError, match=r"their lengths differ: batch.inputs has 5, batch.more.0 has 4"):
        batch_size({"inputs": torch.arange(5), "more": [torch.arange(4)]})


@pytest.mark.parametrize("batch", [3.0, "text", {"a": 1}])
def test_what_has_no_samples_is_refused(batch: Any) -> None:
    with pytest.raises(ConfigError, match="must hold tensors, arrays or lists"):
        batch_size(batch)
