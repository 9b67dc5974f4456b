"""Messages between two ranks. The others take no part, so these calls have no number among the collectives."""

import torch
import torch.distributed as dist
from torch import Tensor

from hora.comm.members import Members
from hora.comm.operands import check_rank, flatten, members_for
from hora.comm.subgroups import Subgroup
from hora.errors import ConfigError


def send(tensor: Tensor, dst: int, *, tag: int = 0, group: Subgroup | None = None) -> None:
    """Sends `tensor` to rank `dst`, which must call `recv`; returns when `tensor` may be overwritten.

    It may wait until `dst` receives: ranks that all send before they receive wait for each other.

    Args:
        tensor: of any dtype.
        dst: another rank.
        tag: number by which `recv` tells messages apart; ignored by NCCL, where messages arrive in order.
        group: in which `dst` is a rank (`new_group`), and within which messages are told apart; by default the session.

    Raises:
        ConfigError: `tensor` is on another device than the session, or `group` has no other rank `dst`.
        CollectiveTimeout: `dst` did not receive in time.
        PeerLost: `dst` is gone.
    """
    here = members_for(group, tensor)
    _check_peer("dst", dst, here)
    flat, _ = flatten(tensor)
    call = here.progress.begin("send", [flat], peer=dst)
    try:
        dist.send(flat.view(torch.uint8), group=here.groups.world, tag=tag, group_dst=dst)
    except RuntimeError as error:
        raise here.progress.explain(call, error) from error
    here.progress.end(call)


def recv(tensor: Tensor, src: int, *, tag: int = 0, group: Subgroup | None = None) -> Tensor:
    """Receives into `tensor` what rank `src` sends.

    Args:
        tensor: overwritten; of the shape and dtype that is sent.
        src: another rank.
        tag: as given to `send`.
        group: as given to `send`.

    Returns:
        `tensor`.

    Raises:
        ConfigError: `tensor` is on another device than the session, or `group` has no other rank `src`.
        CollectiveTimeout: `src` did not send in time.
        PeerLost: `src` is gone.
    """
    here = members_for(group, tensor)
    _check_peer("src", src, here)
    flat, copy_back = flatten(tensor)
    call = here.progress.begin("recv", [flat], peer=src)
    try:
        dist.recv(flat.view(torch.uint8), group=here.groups.world, tag=tag, group_src=src)
    except RuntimeError as error:
        raise here.progress.explain(call, error) from error
    copy_back()
    here.progress.end(call)
    return tensor


def _check_peer(name: str, rank: int, here: Members) -> None:
    check_rank(name, rank, here)
    if rank == here.rank:
        raise ConfigError(f"{name} must be another rank, but this is rank {rank} itself")
