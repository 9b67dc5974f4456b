"""Which device a rank works on. Pure, but for asking torch whether there are GPUs."""

import os
from collections.abc import Mapping, Sequence

import torch

from hora import env
from hora.comm.backends import Backend, choose_backend
from hora.comm.records import Record, neighbours_of
from hora.errors import ConfigError


def choose_backend_and_device(
    backend: str | None, device: torch.device | None, world_size: int, environ: Mapping[str, str] = os.environ
) -> tuple[Backend, torch.device]:
    """The backend and the device it will serve: what was asked for, else GPUs with NCCL when there are any, else CPUs with Gloo.

    Under `hora run --mpi` MPI has been asked for, unless the call says otherwise.

    Returns:
        The device without an index where `settle_device` is to give it one.

    Raises:
        ConfigError: the backend is unknown, or cannot be used here, or not for this device.
    """
    if backend is None and environ.get(env.MPI) == "1" and world_size > 1 and (device is None or device.type == "cpu"):
        backend = "mpi"
    if device is not None:
        return choose_backend(backend, device.type, world_size), device
    if backend is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return choose_backend(None, device.type, world_size), device
    chosen = choose_backend(backend, None, world_size)
    return chosen, torch.device("cuda" if "cuda" in chosen.device_types and torch.cuda.is_available() else "cpu")


def settle_device(device: torch.device, rank: int, records: Sequence[Record]) -> tuple[torch.device, int]:
    """The device of a rank: the one asked for, or the GPU with the number of its local rank.

    Args:
        device: what was asked for, or its type alone.
        rank: the rank.
        records: of all ranks, by rank.

    Returns:
        The device, and how many ranks of lower numbers work on it too.

    Raises:
        ConfigError: there are fewer GPUs than ranks on a node, which may not share them. Raised on every rank, for the others would wait for
            those without. Or the GPU that was asked for by its number is not there; raised on that rank.
    """
    if device.type == "cuda" and device.index is not None and device.index >= (mine := records[rank]).num_gpus:
        raise ConfigError(
            f"rank {rank} is to work on {device}, but {mine.host} shows {mine.num_gpus} GPUs to it; see what hora doctor says of them"
        )
    if str(device) != "cuda":
        return device, 0
    return [_gpu_of(record, neighbours_of(record, records)) for record in records][rank]


def _gpu_of(mine: Record, neighbours: Sequence[Record]) -> tuple[torch.device, int]:
    if mine.local_rank < mine.num_gpus:
        return torch.device("cuda", mine.local_rank), 0
    # A scheduler that shows each rank a GPU of its own leaves each of them a cuda:0.
    shown = [record.visible_gpus for record in neighbours]
    if mine.num_gpus == 1 and None not in shown and len(set(shown)) == len(shown):
        return torch.device("cuda", 0), 0
    if mine.shares_gpus and mine.num_gpus:
        turn, number = divmod(mine.local_rank, mine.num_gpus)
        return torch.device("cuda", number), turn
    remedy = (
        f"start fewer ranks there, or let them share it with {env.SHARE_GPUS}=1, to try a job out"
        if mine.num_gpus
        else "see what hora doctor says of its GPUs"
    )
    raise ConfigError(
        f"each rank needs a GPU of its own, but {mine.host} shows {mine.num_gpus} to its {len(neighbours)} ranks; {remedy}, or work on CPUs "
        "(device cpu)"
    )
