"""Trees of plain values and tensors sent between ranks, without pickle.

A tree (see `codec`) travels as one message of bytes: JSON, then the tensors behind one another. For small things: configurations, counters,
names, a data plan. Parameters go by `collectives.broadcast`, which copies nothing.

Only values can arrive, whatever a peer sends, and no more bytes than the cap.
"""

import json
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hora.comm.codec import Tree, decode, encode
from hora.comm.collectives import all_gather, broadcast
from hora.comm.dtypes import DTYPES, dtype_name
from hora.comm.records import say_ranks
from hora.comm.session import session
from hora.errors import ConfigError

MAX_OBJECT_BYTES = 64 * 1024**2


def broadcast_object(obj: Tree, src: int = 0, *, max_bytes: int = MAX_OBJECT_BYTES) -> Tree:
    """Gives every rank what rank `src` has.

    Collective: all ranks call it.

    Args:
        obj: None, bool, int, float, str, bytes, tensors, and lists, tuples and dicts (keys: str or int) of these; not looked at but on `src`.
        src: the rank that has it.
        max_bytes: largest message.

    Returns:
        A copy, on `src` too; tensors of a GPU are on this rank's GPU.

    Raises:
        ConfigError: on all ranks: `obj` holds something else, or is larger than `max_bytes`.
        CollectiveTimeout, PeerLost: as in `all_reduce`.
    """
    here = session()
    message = _pack_or_refuse(obj, max_bytes) if here.rank == src else torch.empty(0, dtype=torch.uint8)
    length = broadcast(torch.tensor([message.numel()], device=here.device), src)
    message = message.to(here.device) if here.rank == src else torch.empty(int(length), dtype=torch.uint8, device=here.device)
    return _unpack([broadcast(message, src)], [src])[0]


def all_gather_object(obj: Tree, *, max_bytes: int = MAX_OBJECT_BYTES) -> list[Tree]:
    """Gives every rank what all ranks have, by rank.

    Collective: all ranks call it.

    Args:
        obj: as in `broadcast_object`; may differ in form and size.
        max_bytes: largest message of one rank.

    Returns:
        Copies, this rank's own too.

    Raises:
        ConfigError: on all ranks: that of a rank holds something else, or is larger than `max_bytes`; the message names the rank.
        CollectiveTimeout, PeerLost: as in `all_reduce`.
    """
    here = session()
    messages = all_gather(_pack_or_refuse(obj, max_bytes).to(here.device))
    return _unpack(messages, range(here.world_size))


def pack(obj: Tree, max_bytes: int) -> Tensor:
    """A tree as bytes, uint8 on the CPU: the length of the JSON (8 bytes), the JSON, the tensors.

    Raises:
        ConfigError: it cannot be said, or is too large.
    """
    skeleton, tensors = encode(obj)
    entries = [[name, dtype_name(tensor.dtype), list(tensor.shape), tensor.device.type] for name, tensor in tensors.items()]
    head = json.dumps({"tree": skeleton, "tensors": entries}, allow_nan=False).encode()
    size = 8 + len(head) + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if size > max_bytes:
        raise ConfigError(
            f"an object sent between ranks must have at most {max_bytes} bytes, but has {size}; send its tensors with hora.broadcast or "
            "hora.all_gather, or raise max_bytes"
        )
    parts = [len(head).to_bytes(8, "big") + head]
    flat = [tensor.cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()]
    return torch.cat([torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8), *flat])


def unpack(message: Tensor, device: torch.device) -> Tree:
    """What `pack` packed; tensors that were on a GPU are put on `device`.

    Raises:
        ConfigError: the bytes are not what `pack` makes.
    """
    message = message.cpu()
    try:
        end = 8 + int.from_bytes(message[:8].numpy().tobytes(), "big")
        head = json.loads(message[8:end].numpy().tobytes())
        tensors: dict[str, Tensor] = {}
        for name, dtype, shape, device_type in head["tensors"]:
            size = math.prod(_sizes(shape)) * DTYPES[dtype].itemsize
            # A copy begins at an address that fits its dtype; a slice need not.
            values = message[end : end + size].clone().view(DTYPES[dtype]).view(shape)
            tensors[name] = values.to(device) if device_type == device.type else values
            end += size
        return decode(head["tree"], tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"a message between ranks must be one that hora packed, but is not: {error}") from error


def _sizes(shape: Sequence[int]) -> Sequence[int]:
    if any(size < 0 for size in shape):
        raise ValueError(f"a shape cannot be {shape}")
    return shape


def _pack_or_refuse(obj: Tree, max_bytes: int) -> Tensor:
    """The message for `obj`, or one that says why there is none: the others wait for something."""
    try:
        return pack({"object": obj}, max_bytes)
    except ConfigError as error:
        return pack({"refusal": str(error)}, MAX_OBJECT_BYTES)


def _unpack(messages: Sequence[Tensor], ranks: Sequence[int]) -> list[Tree]:
    trees = [unpack(message, session().device) for message in messages]
    refusals = {rank: tree["refusal"] for rank, tree in zip(ranks, trees, strict=True) if "refusal" in tree}
    if refusals:
        raise ConfigError(f"{say_ranks(list(refusals))} cannot send an object: {next(iter(refusals.values()))}")
    return [tree["object"] for tree in trees]
