"""Two messages at once, one there and one here, which is what these algorithms are made of."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from hora.comm.algorithms.base import Begun

_TAG = 0x686F7261
"""Of its own, so that messages of the user's that are on their way between the same ranks are not taken for ours."""


def exchange(sent: Tensor | None, dst: int, received: Tensor | None, src: int, group: dist.ProcessGroup) -> Begun:
    """Begins to send `sent` to `dst` and to receive `received` from `src` (ranks of `group`); None or an empty tensor is no message.

    The two never wait for each other, so that all ranks of a ring may begin at once.
    """
    there = [] if sent is None or sent.numel() == 0 else [sent]
    here = [] if received is None or received.numel() == 0 else [received]
    if must_batch(there + here):
        operations = [dist.P2POp(dist.isend, tensor, group=group, group_peer=dst, tag=_TAG) for tensor in there]
        operations += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=src, tag=_TAG) for tensor in here]
        return dist.batch_isend_irecv(operations)
    # The group's own methods: what batch_isend_irecv puts around them takes 0.2 ms, more than a small message.
    return [*(group.recv([tensor], src, _TAG) for tensor in here), *(group.send([tensor], dst, _TAG) for tensor in there)]


def must_batch(tensors: Sequence[Tensor]) -> bool:
    """NCCL runs the messages of a batch side by side; alone they could wait for each other."""
    return any(tensor.is_cuda for tensor in tensors)
