"""The algorithms by name. An algorithm is one file with one class; to add one, write the file and name its class here."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hora.comm.algorithms.auto import Auto, choice, read_own_text, table_from
from hora.comm.algorithms.base import Algorithm
from hora.comm.algorithms.compressed import Compressed
from hora.comm.algorithms.hierarchical import Hierarchical
from hora.comm.algorithms.native import Native
from hora.comm.algorithms.ordered import Ordered
from hora.comm.algorithms.recursive_doubling import RecursiveDoubling
from hora.comm.algorithms.ring import Ring
from hora.comm.algorithms.symmetric import Symmetric
from hora.comm.groups import Groups
from hora.errors import ConfigError
from hora.plan.algorithm_table import Table

_FIXED: Mapping[str, Algorithm] = {
    "native": Native(),
    "ordered": Ordered(),
    "ring": Ring(),
    "recursive_doubling": RecursiveDoubling(),
    "hierarchical": Hierarchical(),
    "symmetric": Symmetric(),
}
_ALGORITHMS: Mapping[str, Algorithm] = {**_FIXED, "auto": Auto(_FIXED)}


def find_algorithm(name: str, wire_dtype: torch.dtype | None = None) -> Algorithm:
    """The algorithm called `name`, or with `wire_dtype` the one whose values travel so.

    Raises:
        ConfigError: there is none, and the message lists those there are; or both are given.
    """
    if wire_dtype is not None:
        if name != "native":
            raise ConfigError(f'wire_dtype is an algorithm of its own: leave out algorithm="{name}"')
        return Compressed(wire_dtype)
    if name not in _ALGORITHMS:
        raise ConfigError(f'unknown algorithm "{name}"; choose one of: {", ".join(_ALGORITHMS)}')
    return _ALGORITHMS[name]


def settle_algorithm(name: str, tensor: Tensor, groups: Groups) -> str:
    """The algorithm that `name` comes to for an all-reduce of `tensor`: itself, but for "auto"."""
    return choice(tensor, groups) if name == "auto" else name


def own_algorithm_table() -> str | None:
    """The text of the table of "auto" that this user has measured; None where there is none that can be used."""
    return read_own_text(_FIXED)


def algorithm_table(own_text: str | None) -> Table:
    """The table of "auto", given the text of the user's own."""
    return table_from(own_text, _FIXED)


__all__ = ["Algorithm", "algorithm_table", "find_algorithm", "own_algorithm_table", "settle_algorithm"]
