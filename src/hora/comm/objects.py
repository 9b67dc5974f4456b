"""Objects sent between ranks, without pickle: trees of values, tensors, arrays and dataclasses (see `codec`).

A small object travels inside one message. Of a large one the message says the sizes, and the object follows in chunks (see `delivery`): through
a directory that all ranks see, if there is one, or over the network. A rank whose object cannot be sent says so in its message, and the error is
raised on every rank.

Only values can arrive, whatever a peer sends, and no more bytes than it has announced.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hora.comm.codec import Tree
from hora.comm.collectives import all_gather, broadcast
from hora.comm.delivery import Delivery, deliver
from hora.comm.members import Members
from hora.comm.operands import check_rank, members_for
from hora.comm.parcel import Letter, Parcel, Refusal, Sizes, pack_or_refuse
from hora.comm.records import say_ranks
from hora.comm.subgroups import Subgroup
from hora.errors import ConfigError

MAX_OBJECT_BYTES = 64 * 1024**3
"""Largest object by default: what is larger is a mistake."""

INLINE_BYTES = 1024**2
"""Up to what size an object is sent inside the message; every rank has one such message of every other in memory."""

_INLINE_BYTES_FOR_ONE = 64 * 1024
"""The same where only one rank wants what all others get as well."""

_MAX_LETTER_BYTES = 64 * INLINE_BYTES


def broadcast_object(obj: Tree, src: int = 0, *, max_bytes: int = MAX_OBJECT_BYTES, group: Subgroup | None = None) -> Tree:
    """Gives every rank what rank `src` has.

    Collective: all ranks call it.

    Args:
        obj: None, bool, int, float, complex, str, bytes, tensors, NumPy arrays and scalars, and lists, tuples, dicts, sets, frozensets and
            dataclasses of these. Keys and elements of sets: what can be hashed of these, and tuples of it. Not looked at but on `src`.
        src: the rank that has it.
        max_bytes: largest object; the same on all ranks.
        group: which ranks make the call (`new_group`); by default all. Ranks count within it, and large objects go over the network.

    Returns:
        A copy, on `src` too; tensors of a GPU are on this rank's GPU.

    Raises:
        ConfigError: on all ranks: `obj` holds something else, which the message names by its place, or is larger than `max_bytes`. On one rank:
            a dataclass in it is not loaded there, or has other fields.
        CollectiveError: on all ranks: one has no memory for it, or what lies in the shared directory is damaged.
        CollectiveTimeout, PeerLost: as in `all_reduce`; the deadline is for each chunk.
    """
    here = members_for(group)
    check_rank("src", src, here)
    mine = [pack_or_refuse(lambda: Parcel.pack(obj, max_bytes))] if here.rank == src else [None]
    letters = _broadcast_letters(mine, INLINE_BYTES, src, _name("broadcast_object", max_bytes), here, group)
    return _receive(letters, [(src, None)], mine, max_bytes, here, group)[0]


def all_gather_object(obj: Tree, *, max_bytes: int = MAX_OBJECT_BYTES, name: str = "", group: Subgroup | None = None) -> list[Tree]:
    """Gives every rank what all ranks have, by rank.

    Collective: all ranks call it.

    Args:
        obj: as in `broadcast_object`; may differ in form and size.
        max_bytes: largest object of one rank; the same on all ranks.
        name: what it is, for ranks that make other calls meanwhile.
        group: as in `broadcast_object`.

    Returns:
        Copies, this rank's own too.

    Raises:
        ConfigError: as in `broadcast_object`; the message names the rank.
        CollectiveError, CollectiveTimeout, PeerLost: as in `broadcast_object`.
    """
    here = members_for(group)
    mine = pack_or_refuse(lambda: Parcel.pack(obj, max_bytes))
    call = f"all_gather_object of {name}" if name else "all_gather_object"
    letters = _gather_letters(mine.letter(INLINE_BYTES), _name(call, max_bytes), here, group)
    ways = [(rank, None) for rank in range(here.world_size)]
    return _receive(letters, ways, _own(mine, here), max_bytes, here, group)


def gather_object(obj: Tree, dst: int = 0, *, max_bytes: int = MAX_OBJECT_BYTES, group: Subgroup | None = None) -> list[Tree] | None:
    """Gives rank `dst` what all ranks have, by rank.

    Collective: all ranks call it.

    Args:
        obj: as in `broadcast_object`; may differ in form and size.
        dst: the rank that wants it.
        max_bytes: largest object of one rank; the same on all ranks.
        group: as in `broadcast_object`.

    Returns:
        Copies, on `dst`; None elsewhere.

    Raises:
        ConfigError: as in `broadcast_object`; the message names the rank.
        CollectiveError, CollectiveTimeout, PeerLost: as in `broadcast_object`.
    """
    here = members_for(group)
    check_rank("dst", dst, here)
    mine = pack_or_refuse(lambda: Parcel.pack(obj, max_bytes))
    letters = _gather_letters(mine.letter(_INLINE_BYTES_FOR_ONE), _name(f"gather_object to rank {dst}", max_bytes), here, group)
    found = _receive(letters, [(rank, dst) for rank in range(here.world_size)], _own(mine, here), max_bytes, here, group)
    return found if here.rank == dst else None


def scatter_object(objs: Sequence[Tree] | None, src: int = 0, *, max_bytes: int = MAX_OBJECT_BYTES, group: Subgroup | None = None) -> Tree:
    """Gives rank `r` what rank `src` has as `objs[r]`.

    Collective: all ranks call it.

    Args:
        objs: one object a rank, each as in `broadcast_object`; not looked at but on `src`.
        src: the rank that has them.
        max_bytes: largest one of them; the same on all ranks.
        group: as in `broadcast_object`.

    Returns:
        A copy, on `src` too.

    Raises:
        ConfigError: as in `broadcast_object`, or there is not one object a rank; on all ranks.
        CollectiveError, CollectiveTimeout, PeerLost: as in `broadcast_object`.
    """
    here = members_for(group)
    check_rank("src", src, here)
    mine = _pack_each(objs, max_bytes, here.world_size) if here.rank == src else [None] * here.world_size
    letters = _broadcast_letters(mine, INLINE_BYTES // here.world_size, src, _name("scatter_object", max_bytes), here, group)
    ways = [(src, rank) for rank in range(here.world_size)]
    return _receive(letters, ways, mine, max_bytes, here, group)[here.rank]


_Outgoing = Parcel | Refusal | None
"""What this rank sends; None for what another one sends."""


def _pack_each(objs: Sequence[Tree] | None, max_bytes: int, world_size: int) -> list[_Outgoing]:
    """The objects of one rank for each, all refused if one is."""
    if not isinstance(objs, Sequence) or isinstance(objs, str | bytes) or len(objs) != world_size:
        counted = isinstance(objs, Sequence) and not isinstance(objs, str | bytes)
        found = f"{len(objs)} of them" if counted and objs is not None else type(objs).__name__
        return [Refusal(f"scatter_object takes a list of {world_size} objects, one a rank, but got {found}")] * world_size
    packed = [pack_or_refuse(partial(Parcel.pack, obj, max_bytes, (str(index),))) for index, obj in enumerate(objs)]
    refusal = next((one for one in packed if isinstance(one, Refusal)), None)
    return list(packed) if refusal is None else [refusal] * world_size


def _own(mine: _Outgoing, here: Members) -> list[_Outgoing]:
    return [mine if rank == here.rank else None for rank in range(here.world_size)]


def _gather_letters(letter: Tensor, name: str, here: Members, group: Subgroup | None) -> list[Letter]:
    """The letters of all ranks. Collective."""
    return [Letter(content) for content in all_gather(letter.to(here.device), name=name, group=group)]


def _broadcast_letters(
    mine: Sequence[_Outgoing], inline_bytes: int, src: int, name: str, here: Members, group: Subgroup | None
) -> list[Letter]:
    """As many letters of rank `src` as `mine` has places. Collective."""
    letters = [outgoing.letter(inline_bytes) for outgoing in mine if outgoing is not None]
    lengths = torch.tensor([letter.numel() for letter in letters] or [0] * len(mine), device=here.device)
    sizes = broadcast(lengths, src, name=name, group=group).tolist()
    if min(sizes) < 0 or sum(sizes) > _MAX_LETTER_BYTES:
        raise ConfigError(f"messages of objects must have at most {_MAX_LETTER_BYTES} bytes, but rank {src} announced {sizes}")
    content = torch.cat(letters).to(here.device) if letters else torch.empty(sum(sizes), dtype=torch.uint8, device=here.device)
    return [Letter(part) for part in broadcast(content, src, name=name, group=group).split(sizes)]


def _receive(
    letters: Sequence[Letter],
    ways: Sequence[tuple[int, int | None]],
    mine: Sequence[_Outgoing],
    max_bytes: int,
    here: Members,
    group: Subgroup | None,
) -> list[Tree]:
    """What has come by each of the `ways` (from which rank, to which or all), with None for what is for other ranks.

    Collective: all ranks have the same letters.
    """
    _raise_refusals({src: letter.refusal for letter, (src, _) in zip(letters, ways, strict=True) if letter.refusal is not None})
    large = {
        index: Delivery(src, dst, _checked(letter.large, max_bytes, src), own if isinstance(own, Parcel) else None)
        for index, (letter, (src, dst), own) in enumerate(zip(letters, ways, mine, strict=True))
        if letter.large is not None
    }
    arrived = dict(zip(large, deliver(list(large.values()), group) if large else (), strict=True))
    trees: list[Any] = [None] * len(letters)
    for index, (letter, (_, dst)) in enumerate(zip(letters, ways, strict=True)):
        if dst in (None, here.rank):
            # Popped, so that what is not part of the tree goes before the next one is put together.
            opened = arrived.pop(index, None)
            trees[index] = letter.open(here.device) if opened is None else opened.tree()
    return trees


def _raise_refusals(refusals: dict[int, str]) -> None:
    if refusals:
        raise ConfigError(f"{say_ranks(list(refusals))} cannot send an object: {next(iter(refusals.values()))}")


def _checked(sizes: Sizes, max_bytes: int, src: int) -> Sizes:
    if sizes.total > max_bytes:
        raise ConfigError(f"an object must have at most {max_bytes} bytes, but rank {src} announced one of {sizes.total}")
    return sizes


def _name(call: str, max_bytes: int) -> str:
    """By which the ranks tell one call from another: limits that differ would make one rank go on where another gives up."""
    return call if max_bytes == MAX_OBJECT_BYTES else f"{call} of at most {max_bytes} bytes"
