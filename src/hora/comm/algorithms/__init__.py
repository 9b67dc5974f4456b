"""The algorithms by name. An algorithm is one file with one class; to add one, write the file and name its class here."""

from collections.abc import Mapping

from hora.comm.algorithms.base import Algorithm
from hora.comm.algorithms.hierarchical import Hierarchical
from hora.comm.algorithms.native import Native
from hora.comm.algorithms.ordered import Ordered
from hora.comm.algorithms.recursive_doubling import RecursiveDoubling
from hora.comm.algorithms.ring import Ring
from hora.errors import ConfigError

_ALGORITHMS: Mapping[str, Algorithm] = {
    "native": Native(),
    "ordered": Ordered(),
    "ring": Ring(),
    "recursive_doubling": RecursiveDoubling(),
    "hierarchical": Hierarchical(),
}


def find_algorithm(name: str) -> Algorithm:
    """The algorithm called `name`.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    if name not in _ALGORITHMS:
        raise ConfigError(f'unknown algorithm "{name}"; choose one of: {", ".join(_ALGORITHMS)}')
    return _ALGORITHMS[name]


__all__ = ["Algorithm", "find_algorithm"]
