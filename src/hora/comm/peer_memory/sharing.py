"""How the ranks of a group come to share memory of their GPUs: they find out whether all can, map it, and find out whether all have."""

import os
import socket
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hora import env, log
from hora.comm.interfaces import variables_set
from hora.comm.peer_memory.pulling import Layout, Pulling
from hora.comm.peer_memory.window import MOST_BLOCKS, MOST_RANKS, PeerMemory, Window, flag_bytes, window_bytes
from hora.comm.torch_private import all_gather_single, allocate_for_peers, map_to_peers, nvlinks_of

_NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""The kernels do without, and mapping memory for it can fail where mapping it for peers does not."""

_MULTICAST = (9, 0)
"""From this capability on GPUs have it."""
_NVLS = "NCCL_NVLS_ENABLE"

_TRIAL_S = 10.0

T = TypeVar("T")

_MIN_CAPABILITY = (7, 0)  # flags are read with acquire


def share(group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> PeerMemory | None:
    """Memory of GPUs that all ranks of `group` map; None where one of them cannot, on all alike.

    Collective: all ranks of `group` call it; never while a CUDA graph is captured.

    Args:
        group: of all ranks of the job, of backend nccl; others have none: torch counts the mappings of a process, so that some ranks alone must make
            none.
        device: of this rank.
        timeout_s: how long a kernel waits for a rank.
    """
    if dist.get_backend(group) != "nccl" or not 2 <= group.size() <= MOST_RANKS or group.size() != dist.get_world_size():
        return None
    blocks = min(MOST_BLOCKS, torch.cuda.get_device_properties(device).multi_processor_count // 2)
    agreed = _agree(_unavailable_because(device), group, device, blocks)
    if agreed is None:
        return None
    blocks, indices = agreed
    memories: list[Tensor] = []
    problem = _unlinked_because(device, indices)
    try:
        _try_kernels(device)
        torch.cuda.empty_cache()
        memories = [allocate_for_peers(window_bytes(group.size(), blocks), device) for _ in range(2)]
    except Exception as error:  # whatever it is, the others must hear of it
        problem = f"it cannot be made here: {error}"
    if _agree(problem, group, device, blocks) is None:
        return None
    made: PeerMemory | None = None
    try:
        made = _map(memories, group, blocks, timeout_s)
    except Exception as error:
        problem = f"mapping it has failed: {error}"
    torch.cuda.synchronize(device)  # the flags are zero before a peer writes one, which it does after `_agree`
    return None if _agree(problem, group, device, blocks) is None else made


def share_tensors(
    group: dist.ProcessGroup, device: torch.device, timeout_s: float, fault: Tensor, numels: Sequence[int], dtypes: Sequence[torch.dtype]
) -> Pulling | None:
    """Tensors of zeros that all ranks of `group` map, of `PULLED_DTYPES`; None where one of them cannot, on all alike.

    Collective: all ranks of `group`, which `share` memory, call it with the same lengths and types; never while a CUDA graph is captured.
    """
    layout = Layout(numels, dtypes, group.size())

    def allocate() -> Tensor:
        if (problem := _unwanted_because(device, group.size())) is not None:
            raise RuntimeError(problem)
        _try_pulling(device, dtypes, group.size())
        torch.cuda.empty_cache()
        return allocate_for_peers(layout.size_bytes, device)

    def map_all(memory: Tensor) -> Pulling:
        with variables_set(_NO_MULTICAST):
            shares = map_to_peers(memory, group)
        made = Pulling(shares, layout, group.rank(), timeout_s, fault)
        torch.cuda.synchronize(device)  # the flags are zero before a peer writes one, which it does when all have come here
        return made

    def try_out(made: Pulling) -> Pulling:
        if not made.adds_up():
            raise RuntimeError("what is copied from GPU to GPU is not what was there")
        return made

    memory = _on_all(allocate, group, device)
    made = None if memory is None else _on_all(partial(map_all, memory), group, device)
    made = None if made is None else _on_all(partial(try_out, made), group, device)
    if made is not None:
        log.get_logger().debug("copy engines sum %d tensors, in %.0f MiB that GPUs share", len(numels), layout.size_bytes / 2**20)
    return made


def _on_all(attempt: Callable[[], T], group: dist.ProcessGroup, device: torch.device) -> T | None:
    """What `attempt` gives, if it succeeds on all ranks; else None, on all alike. Collective."""
    made, problem = None, None
    try:
        made = attempt()
    except Exception as error:  # whatever it is, the others must hear of it
        problem = str(error)
    return made if _agree(problem, group, device, 1) is not None else None


def _unwanted_because(device: torch.device, world_size: int) -> str | None:
    """What speaks against copy engines, which were timed beside NCCL without multicast alone."""
    if os.environ.get(env.COPY_ENGINES) == "0":
        return f"{env.COPY_ENGINES}=0"
    if world_size > 2 and torch.cuda.get_device_capability(device) >= _MULTICAST and os.environ.get(_NVLS) != "0":
        return f"NCCL may have NVLink multicast on {world_size} GPUs; {_NVLS}=0 says that it has none"
    return None


def _unavailable_because(device: torch.device) -> str | None:
    if torch.version.hip is not None or find_spec("triton") is None:
        return "Triton for NVIDIA's GPUs is not installed"
    if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return "the GPU is older than the kernels need"
    return None


def _unlinked_because(device: torch.device, indices: Sequence[int]) -> str | None:
    """What speaks against the way between this GPU and those of the other ranks, which have `indices` here."""
    links = nvlinks_of(device)
    if len(set(indices)) < len(indices):
        return "ranks do not see each other's GPUs: each has one of its own alone"
    if links is not None and any(index != device.index and (index >= len(links) or not links[index]) for index in indices):
        return "NVLink does not lead from this GPU to those of all other ranks"
    return None


def _agree(problem: str | None, group: dist.ProcessGroup, device: torch.device, blocks: int) -> tuple[int, list[int]] | None:
    """The smallest of `blocks` and the GPUs of all ranks, if no rank has a problem and all are on one host; logs what this rank's problem is."""
    if problem is not None:
        log.get_logger().debug("no memory of GPUs is shared: %s", problem)
    mine = torch.tensor([0 if problem else 1, _host(), blocks, device.index], device=device)
    told = torch.empty(group.size(), len(mine), dtype=mine.dtype, device=device)
    all_gather_single(told.view(-1), mine, group=group)
    able, hosts, most, indices = (list(column) for column in zip(*told.tolist(), strict=True))
    return (min(most), indices) if all(able) and len(set(hosts)) == 1 else None


def _host() -> int:
    """The same number for processes of one kernel and one container."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return zlib.crc32(f"{boot.read_text() if boot.exists() else ''}{socket.gethostname()}".encode())


def _try_kernels(device: torch.device) -> None:
    """Compiles the kernels and sums a few numbers with them: of two ranks that are both this one, whose flags are up before they begin.

    Raises:
        RuntimeError: the sum is wrong.
        Exception: there is no compiler, or nothing can be written where it keeps what it has made.
    """
    memory = torch.zeros(window_bytes(2, 1), dtype=torch.uint8, device=device)
    memory[: flag_bytes(2, 1)].view(torch.int64).fill_(1 << 32)
    fault = torch.zeros((), dtype=torch.int32, device="cpu").pin_memory()
    window = Window(memory, 1, [memory.data_ptr()] * 2, 0, _TRIAL_S, fault)
    for read_all in (True, False):
        numbers = torch.arange(16.0, device=device)
        window.all_reduce(numbers, read_all=read_all)
        if not torch.equal(numbers[:8], 2 * torch.arange(8.0, device=device)):
            raise RuntimeError("the kernels do not add up on this GPU")


def _try_pulling(device: torch.device, dtypes: Sequence[torch.dtype], world_size: int) -> None:
    """Compiles the kernels of `Pulling` and sums a few numbers with them: of ranks that are all this one, whose flags are up before they begin.

    Raises:
        RuntimeError: the sum is wrong.
        Exception: as of `_try_kernels`.
    """
    for dtype in dict.fromkeys(dtypes):
        layout = Layout([64], [dtype], world_size)
        memory = torch.zeros(layout.size_bytes, dtype=torch.uint8, device=device)
        memory[: layout.places[0][0]].view(torch.int64).fill_(1 << 32)
        alone = Pulling([memory] * world_size, layout, 0, _TRIAL_S, torch.zeros((), dtype=torch.int32, device="cpu").pin_memory())
        numbers = alone.tensors[0].fill_(1)
        alone.begin(0).wait()
        if not torch.equal(numbers, torch.full_like(numbers, world_size)):
            raise RuntimeError(f"the kernels do not add up {dtype} on this GPU")


def _map(memories: Sequence[Tensor], group: dist.ProcessGroup, blocks: int, timeout_s: float) -> PeerMemory:
    fault = torch.zeros((), dtype=torch.int32, device="cpu").pin_memory()
    with variables_set(_NO_MULTICAST):
        addresses = [[share.data_ptr() for share in map_to_peers(memory, group)] for memory in memories]
    calls, captured = (
        Window(memory, blocks, there, group.rank(), timeout_s, fault) for memory, there in zip(memories, addresses, strict=True)
    )
    return PeerMemory(calls, captured, fault)
