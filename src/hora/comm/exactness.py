"""Exact mode: what a process must be like so that any number of ranks computes the same bits.

The global batch is dealt to a fixed number of logical ranks, and sums are taken over those in one fixed tree (`plan.logical`); here is the rest:
deterministic kernels, no tuning that depends on timing, one number of threads. Li et al., EasyScale: Elastic Training with Consistent
Accuracy and Improved Utilization on GPUs (SC'23) showed that it can be done.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hora import env
from hora.comm.interfaces import variables_set
from hora.errors import ConfigError

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_INDUCTOR = "TORCHINDUCTOR_DETERMINISTIC"
_DETERMINISTIC: Any = torch.utils.deterministic  # a module whose attribute is a property, which type checkers do not see
_REPRODUCIBLE = (":4096:8", ":16:8")


@dataclass(frozen=True)
class Exact:
    """What fixes the bits of a run, the same for its whole life on any number of ranks.

    Attributes:
        logical_ranks: parts that each global batch is dealt to; at most so many ranks can train.
        seed: of the random numbers that a model draws.
        num_threads: of each rank on the CPU: how a sum is split among threads changes its bits.

    Raises:
        ConfigError: a number is out of range.
    """

    logical_ranks: int = env.DEFAULT_LOGICAL_RANKS
    seed: int = 0
    num_threads: int = 1

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least 1, but is {getattr(self, name)} instead"
            for name in ("logical_ranks", "num_threads")
            if getattr(self, name) < 1
        ]
        if problems:
            raise ConfigError("; ".join(problems))

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())

    @classmethod
    def choose(cls, asked: "bool | Exact | None", environ: Mapping[str, str] = os.environ) -> "Exact | None":
        """What `hora.init(exact=asked)` means: None leaves it to the launcher (`hora run --exact`).

        Raises:
            ConfigError: the variable holds no number.
        """
        if isinstance(asked, Exact):
            return asked
        told = environ.get(env.EXACT, "")
        if asked is False or (asked is None and not told):
            return None
        if told and not told.isdecimal():
            raise ConfigError(f"{env.EXACT} must be the number of logical ranks, but is {told!r} instead")
        return cls(logical_ranks=int(told)) if told else cls()


@contextmanager
def reproducible(exact: Exact | None, device: torch.device) -> Iterator[None]:
    """Inside the `with` block kernels are deterministic, and threads as many as `exact` says; with None nothing is changed.

    Raises:
        ConfigError: CUDA was in use before, with a cuBLAS that is not reproducible.
    """
    if exact is None:
        yield
        return
    if device.type == "cuda":
        _settle_cublas()
    before = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark, torch.get_num_threads()
    filled = _DETERMINISTIC.fill_uninitialized_memory
    # torch.use_deterministic_algorithms means the same, but loads the compiler, which takes seconds; that reads the variable when it is loaded.
    with variables_set({_INDUCTOR: "1"}):
        torch.set_deterministic_debug_mode("error")
        # Else every new tensor is written twice, to show up kernels that read what nobody wrote; none of ours does.
        _DETERMINISTIC.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False
        torch.set_num_threads(exact.num_threads)
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before[0])
            _DETERMINISTIC.fill_uninitialized_memory = filled
            torch.backends.cudnn.benchmark = before[1]
            torch.set_num_threads(before[2])


def _settle_cublas() -> None:
    """Gives cuBLAS the workspace with which it is reproducible; it reads the variable when CUDA is first used."""
    if os.environ.get(_CUBLAS) in _REPRODUCIBLE:
        return
    if torch.cuda.is_initialized():
        raise ConfigError(
            f"exact mode must be switched on before CUDA is first used, but it is in use and {_CUBLAS} is {os.environ.get(_CUBLAS)!r}: call "
            f"hora.init(exact=True) first, or set {_CUBLAS}={_REPRODUCIBLE[0]}"
        )
    os.environ[_CUBLAS] = _REPRODUCIBLE[0]
