"""Takes something out of the script, to see whether the runs still differ: rounding, dropout, or the statistics of BatchNorm.

Acts in the script's processes, right after torch was imported.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hora import env
from hora.diag.prove.ablation_names import BATCH_NORM, DROPOUT, FLOAT64

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@dataclass(frozen=True)
class Ablation:
    """What is taken out."""

    without: frozenset[str] = frozenset()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "Ablation":
        """What the command asked for."""
        return cls(frozenset(filter(None, environ.get(env.PROVE_WITHOUT, "").split(","))))

    def install(self) -> None:
        """Changes torch in this process."""
        if FLOAT64 in self.without:
            torch.set_default_dtype(torch.float64)
            torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
        if DROPOUT in self.without:
            for name in _DROPOUTS:
                setattr(F, name, _identity)
            torch.dropout = _identity
            F.scaled_dot_product_attention = _without_dropout(F.scaled_dot_product_attention)
        if BATCH_NORM in self.without:
            F.batch_norm = _with_running_statistics(F.batch_norm)

    def prepare(self, root: nn.Module) -> None:
        """Changes a model that is about to be called."""
        if DROPOUT in self.without:
            for module in root.modules():
                if isinstance(module, nn.RNNBase):
                    module.dropout = 0.0

    def cast(self, value: Any) -> Any:
        """Inputs of a model or a loss: float64 where they are float32."""
        return to_float64(value) if FLOAT64 in self.without else value


def to_float64(value: Any) -> Any:
    """The same with every floating-point tensor in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(to_float64, value))
    if isinstance(value, list | tuple):
        return type(value)(map(to_float64, value))
    if type(value) is dict:
        return {key: to_float64(item) for key, item in value.items()}
    if (
        is_dataclass(value)
        and not isinstance(value, type)
        and any(isinstance(getattr(value, field.name), Tensor) for field in fields(value))
    ):
        return replace(value, **{field.name: to_float64(getattr(value, field.name)) for field in fields(value) if field.init})
    return value


def _identity(input: Any, *_: Any, **__: Any) -> Any:  # noqa: A002 (the name that callers may use)
    return input


def _without_dropout(attention: Callable[..., Any]) -> Callable[..., Any]:
    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **more: Any) -> Any:  # noqa: ARG001
        return attention(query, key, value, attn_mask, 0.0, *rest, **more)

    return attend


def _with_running_statistics(batch_norm: Callable[..., Any]) -> Callable[..., Any]:
    def normalize(
        input: Any,  # noqa: A002 (the name that callers may use)
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        *rest: Any,
        **more: Any,
    ) -> Any:
        return batch_norm(input, running_mean, running_var, weight, bias, training and running_mean is None, *rest, **more)

    return normalize
