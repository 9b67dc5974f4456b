"""Buffers of a model that is trained on several ranks.

BatchNorm's running statistics are linear in the batches' statistics, so combining them over the ranks when somebody looks (evaluation,
checkpoint) gives what combining them after every step would. All other buffers, and integer ones, are rank 0's.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hora.comm.collectives import all_reduce
from hora.comm.session import session
from hora.sync.parameters import broadcast_parameters


@torch.no_grad()
def sync_buffers(model: nn.Module, weight: float | Tensor = 1.0) -> None:
    """Makes the buffers of `model` equal on all ranks. Collective; call it before evaluation and before saving.

    Args:
        model: running means and variances become the ranks' mean, all other buffers rank 0's. Overwritten in place.
        weight: how many samples this rank's statistics were made of, to weigh the mean. Ranks with weight 0 take the others' statistics.
    """
    if session().world_size == 1 or session().exact:  # exact mode keeps them equal after every step
        return
    statistics = _running_statistics(model)
    linear = {id(buffer) for buffer in statistics}
    broadcast_parameters([(name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in linear])
    if statistics:
        _average(statistics, weight)


def _running_statistics(model: nn.Module) -> list[Tensor]:
    return [
        buffer
        for module in model.modules()
        if isinstance(module, _NormBase)
        for buffer in (module.running_mean, module.running_var)
        if buffer is not None
    ]


def _average(statistics: list[Tensor], weight: float | Tensor) -> None:
    flat = torch.cat([buffer.reshape(-1).double() for buffer in statistics])
    share = torch.as_tensor(weight, dtype=torch.float64, device=flat.device).reshape(1)
    sums = all_reduce(torch.cat([flat * share, share]))
    mean = torch.where(sums[-1] == 0, flat, sums[:-1] / sums[-1])
    for buffer, part in zip(statistics, mean.split([buffer.numel() for buffer in statistics]), strict=True):
        buffer.copy_(part.view(buffer.shape))
