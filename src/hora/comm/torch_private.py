"""The names of torch that are private, or public under different names in the versions we support, in one place.

PyTorch lets a backend be written in Python (`ProcessGroup` subclasses), but the completed `Work` that such a group returns can be made
only through a private function. The stores are documented as `torch.distributed.Store` and so on, but not exported in a way that type checkers
accept. The store of a group that somebody else made has no public way to it, nor has the count of changes that autograd keeps of a tensor, nor
the order of its hooks.
GradScaler's look for values that are not finite is a private function; so are the norm of many tensors in one kernel, and their copies.
Memory that GPUs map of each other (symmetric memory) is documented under a module with an underscore; how they are linked is told nowhere else.
The name "mpi" is torch's own, which it refuses where it was built without MPI: `provide_mpi` is the one place where torch is changed.
What cuts a compiled model at the buckets of DistributedDataParallel works for others too, and is documented nowhere.
PyTorch 2.13 renamed two public collectives and warns on the old names. Nothing else of torch that begins
with an underscore is used here.
"""

import inspect
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
from torch._C._distributed_c10d import FileStore as FileStore
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from hora import log

# 2.13 calls them *_single and warns (FutureWarning) on the old names, which are the only ones before.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# One kernel each for any number of tensors; None where torch has it no more.
non_finite_check: Any = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)
norms_of_many: Any = getattr(torch, "_foreach_norm", None)
divide_many: Any = getattr(torch, "_foreach_div_", None)
copy_many: Any = getattr(torch, "_foreach_copy_", None)
_nn: Any = getattr(torch._C, "_nn", None)
flatten_many: Any = getattr(_nn, "flatten_dense_tensors", None)
unflatten_many: Any = getattr(_nn, "unflatten_dense_tensors", None)

# The stubs describe what the methods of a group accept from Python callers, not what C++ passes to a group written in Python.
PythonProcessGroup: Any = dist.ProcessGroup
PythonWork: Any = dist.Work


def version_of(tensor: Tensor) -> int:
    """How often `tensor` has been changed in place; always 0 where torch does not say."""
    return int(getattr(tensor, "_version", 0))


def store_of_group() -> Store:
    """The store of the default group: what its ranks met through."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def completed_work(result: Any, device: torch.device) -> dist.Work:
    """A `Work` that is complete and carries `result` (tensors on `device`), in the order of the current stream on a GPU.

    It is a C++ object: one that Python subclasses could be freed while C++ still holds it.
    """
    future: torch.futures.Future[Any] = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
    future.set_result(result)
    work: dist.Work = _create_work_from_future(future)
    return work


def allocate_for_peers(size_bytes: int, device: torch.device) -> Tensor:
    """Zeros on `device` that can be mapped by other processes of this host.

    Raises:
        RuntimeError: there is no memory, or this torch does not know how.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        raise RuntimeError("PyTorch before 2.11 maps memory once for each name of a group, and a second session has the first one's names")
    try:
        from torch.distributed import _symmetric_memory as symmetric
    except ImportError as error:
        raise RuntimeError(str(error)) from error
    memory: Tensor = symmetric.empty(size_bytes, dtype=torch.uint8, device=device)
    return memory.zero_()


def map_to_peers(memory: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Maps memory from `allocate_for_peers` into all ranks of `group`; that of each rank as a tensor on this rank's device.

    This rank's own is `memory`, with which the others' are mapped as long as it lives. Collective: all ranks of `group` call it, on GPUs of one host.
    Torch counts these calls a process, so that all ranks of a job make all of them.
    """
    from torch.distributed import _symmetric_memory as symmetric

    handle: Any = symmetric.rendezvous(memory, group)
    offset = memory.data_ptr() - handle.buffer_ptrs[handle.rank]
    mine = group.rank()
    return [memory if rank == mine else handle.get_buffer(rank, memory.shape, memory.dtype, offset) for rank in range(group.size())]


def nvlinks_of(device: torch.device) -> list[int] | None:
    """How many NVLinks lead from `device` to each GPU that this process sees; None where torch does not know."""
    try:
        from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

        links: list[list[int]] = _detect_dma_connectivity(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
        return list(links[device.index or 0])
    except (ImportError, AttributeError, IndexError, RuntimeError):
        return None


def provide_mpi(create: Callable[[list[int], timedelta], Any]) -> str | None:
    """Has torch make its groups of backend "mpi" by `create(world ranks, timeout)`, where it was built without MPI; again does nothing.

    Torch asks `ProcessGroupMPI.create` for such a group, if it has that class, tells it neither timeout nor store, and believes it about rank and
    size. Here it is given the class, and the function that calls it hands the timeout on.

    Returns:
        Why this torch cannot be used so; None when it is done, or was built with MPI and is left alone.
    """
    c10d: Any = dist.distributed_c10d
    if dist.is_mpi_available():
        return None
    helper: Any = getattr(c10d, "_new_process_group_helper", None)
    parameters = [] if helper is None else list(inspect.signature(helper).parameters)
    if parameters[:6] != _HELPER_PARAMETERS or "timeout" not in parameters or not hasattr(c10d, "_MPI_AVAILABLE"):
        return f"PyTorch {torch.__version__} makes its groups in a way that this version of Hora does not know"
    asked: list[timedelta] = []
    index = parameters.index("timeout")

    class ProcessGroupMPI:
        """What torch asks for a group."""

        @staticmethod
        def create(ranks: list[int]) -> Any:
            return create(ranks, asked[-1])

    @wraps(helper)
    def make(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs.get("timeout") or (args[index] if len(args) > index else None) or c10d.default_pg_timeout)
        try:
            return helper(*args, **kwargs)
        finally:
            asked.pop()

    c10d.ProcessGroupMPI, c10d._new_process_group_helper, c10d._MPI_AVAILABLE = ProcessGroupMPI, make, True
    return None


_HELPER_PARAMETERS = ["group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"]


def give_store(store: Store) -> None:
    """Gives the default group a store, where torch made it without one."""
    c10d: Any = dist.distributed_c10d
    backend, _ = c10d._world.pg_map[dist.group.WORLD]
    c10d._world.pg_map[dist.group.WORLD] = (backend, PrefixStore("default_pg", store))


def compile_in_parts(graph: torch.fx.GraphModule, inputs: list[Tensor], part_bytes: int, backend: str) -> Any:
    """Has `backend` of torch.compile make `graph` in parts whose parameters have `part_bytes` each, the last ones first, so that the gradients of a
    part come while backward goes on; or whole, with a warning, where torch does not cut it.
    """
    from torch._dynamo import lookup_backend

    compile_part = lookup_backend(backend)
    try:
        from torch._dynamo.backends.distributed import DDPOptimizer

        return DDPOptimizer(part_bytes, compile_part, first_bucket_cap=part_bytes).compile_fn(graph, inputs)
    except (ImportError, AttributeError, TypeError, NotImplementedError) as error:
        log.get_logger().warning("PyTorch does not cut this model, which is compiled as a whole and not in parts: %s", error)
        return compile_part(graph, inputs)


def is_last_hook(parameter: Tensor, number: int) -> bool:
    """Whether the hook `number` (`RemovableHandle.id`) on the accumulated gradient of `parameter` runs after all others; False if torch does not
    say.
    """
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(hooks and next(reversed(hooks)) == number)


class OwnStepHook:
    """A hook of Hora's on the steps of an optimizer."""

    def __init__(self, call: Callable[[], None]):
        self._call = call

    def __call__(self, *_: Any) -> None:
        """Torch gives the optimizer and the arguments of its step."""
        self._call()


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody but Hora wants to be called before or after a step of `optimizer`, or that is not known."""
    hooks = [getattr(optimizer, name, None) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")]
    return any(found is None or not all(isinstance(hook, OwnStepHook) for hook in found.values()) for found in hooks)
