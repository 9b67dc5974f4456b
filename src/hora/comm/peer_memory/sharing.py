"""How the ranks of a group come to share memory of their GPUs: they find out whether all can, map it, and find out whether all have."""

import socket
import zlib
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from hora import log
from hora.comm.interfaces import variables_set
from hora.comm.peer_memory.window import MOST_RANKS, PeerMemory, Window, window_bytes
from hora.comm.torch_private import count_nvlinks, map_memory_of_peers

_NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""The kernels do without, and mapping memory for it can fail where mapping it for peers does not."""

_MIN_CAPABILITY = (7, 0)  # flags are read with acquire


def share(group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> PeerMemory | None:
    """Memory of GPUs that all ranks of `group` map; None where one of them cannot, on all alike.

    Collective: all ranks of `group` call it; never while a CUDA graph is captured.

    Args:
        group: not of backend nccl, or of too many ranks: none.
        device: of this rank.
        timeout_s: how long a kernel waits for a rank.
    """
    if dist.get_backend(group) != "nccl" or not 2 <= group.size() <= MOST_RANKS:
        return None
    problem = _unavailable_because(device)
    if not _all_can(problem, group, device):
        return None
    made: PeerMemory | None = None
    try:
        made = _map(group, device, timeout_s)
    except RuntimeError as error:
        problem = f"mapping it has failed: {error}"
    return made if _all_can(problem, group, device) else None


def _unavailable_because(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return "the GPU is older than the kernels need"
    if count_nvlinks(device) == 0:
        return "no NVLink leads from this GPU to another one"
    return None


def _all_can(problem: str | None, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether no rank has a problem, and all are on one host: tells all, and logs what this rank's problem is."""
    if problem is not None:
        log.get_logger().debug("no memory of GPUs is shared: %s", problem)
    mine = torch.tensor([0 if problem else 1, host := _host(), -host], device=device)
    dist.all_reduce(mine, dist.ReduceOp.MIN, group=group)
    able, least, negated_most = mine.tolist()
    return bool(able) and least == -negated_most


def _host() -> int:
    """The same number for processes of one kernel and one container."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return zlib.crc32(f"{boot.read_text() if boot.exists() else ''}{socket.gethostname()}".encode())


def _map(group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> PeerMemory:
    fault = torch.zeros((), dtype=torch.int32).pin_memory()

    def window() -> Window:
        memory, addresses = map_memory_of_peers(window_bytes(group.size()), device, group)
        return Window(memory, addresses, group.rank(), timeout_s, fault)

    with variables_set(_NO_MULTICAST):
        made = PeerMemory(window(), window(), fault)
    torch.cuda.synchronize(device)  # the flags are zero before a peer writes one, which it does after `_all_can`
    return made
