"""What scripts import from `horovod.common.util`."""

import torch

from hora.hvd.basics import ccl_built, check_extension, ddl_built, gloo_built, mpi_built, nccl_built
from hora.hvd.buckets import split_list
from hora.hvd.engine.adasum import is_power_of_two as num_rank_is_power_2

__all__ = [
    "ccl_built", "check_extension", "ddl_built", "extension_available", "gloo_built", "gpu_available", "mpi_built", "nccl_built",
    "num_rank_is_power_2", "split_list",
]  # fmt: skip


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001 (Horovod's)
    """Whether there is `horovod.torch`, or whichever front end is asked for."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the front end `ext_base_name` has GPUs."""
    return extension_available(ext_base_name, verbose) and torch.cuda.is_available()
