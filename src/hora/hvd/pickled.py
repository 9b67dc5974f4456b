"""The one place of Hora where pickle exists: objects that the typed encoding cannot say, where the user has allowed it.

Whoever can send bytes to a rank can then have it run anything; so it is off unless HORA_HVD_ALLOW_PICKLE=1, and says when it is used.
"""

import os
import warnings
from collections.abc import Mapping
from typing import Any

from hora import env
from hora.errors import ConfigError

_MARK = "hora.hvd pickle"


def is_allowed(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the user has allowed pickle."""
    return environ.get(env.HVD_ALLOW_PICKLE) == "1"


def wrap(obj: object) -> dict[str, bytes]:
    """`obj` as bytes that `unwrap` knows."""
    import pickle

    warnings.warn(
        f"{type(obj).__name__} is sent by pickle, as {env.HVD_ALLOW_PICKLE}=1 allows: a rank runs whatever another one sends",
        RuntimeWarning,
        stacklevel=4,
    )
    return {_MARK: pickle.dumps(obj)}


def is_wrapped(tree: Any) -> bool:
    """Whether `wrap` made this."""
    return isinstance(tree, dict) and list(tree) == [_MARK]


def unwrap(tree: dict[str, bytes]) -> Any:
    """The object.

    Raises:
        ConfigError: pickle is not allowed on this rank.
    """
    if not is_allowed():
        raise ConfigError(
            f"an object came by pickle, but this rank has not allowed it; set {env.HVD_ALLOW_PICKLE}=1 on all ranks or on none"
        )
    import pickle

    return pickle.loads(tree[_MARK])
