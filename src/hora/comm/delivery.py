"""Brings large objects from the rank that has them to those that want them, in chunks: a rank needs one chunk beside the object itself.

They go through the folder that all ranks see (`shared_directory`) where there is one, and else over the network. Whether there is one is found
out when the first large object is sent: rank 0 leaves a random word in a folder, and all must find it there. After each step that can fail on
one rank alone the ranks tell each other, so that all of them raise the error, and nobody waits for one that has given up.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from hora import events, log
from hora.comm.collectives import all_gather, barrier, broadcast
from hora.comm.members import Members
from hora.comm.messages import recv, send
from hora.comm.parcel import Opened, Parcel, Sizes, head_as_tensor, plan_chunks, stream
from hora.comm.records import say_ranks
from hora.comm.session import Session, session
from hora.comm.shared_directory import Folder, Handle, Reader
from hora.comm.subgroups import Subgroup
from hora.errors import CollectiveError

CHUNK_BYTES = 16 * 1024**2

_T = TypeVar("_T")
_CPU = torch.device("cpu")
_NAME = "large object"
_LONGEST_REASON = 1000


@dataclass(frozen=True)
class Delivery:
    """One object on its way.

    Attributes:
        src: the rank that has it.
        dst: the rank that wants it; None: all want it.
        sizes: its size in bytes, known to all ranks.
        parcel: the object, on `src`.
    """

    src: int
    dst: int | None
    sizes: Sizes
    parcel: Parcel | None

    def is_for(self, rank: int) -> bool:
        """Whether `rank` wants it."""
        return self.dst in (None, rank)


def deliver(deliveries: Sequence[Delivery], group: Subgroup | None = None) -> list[Opened | None]:
    """Delivers objects one after the other; what has come, by delivery, with None for what is for others.

    Collective: all ranks call it with the same deliveries, or those of `group`, whose objects go over the network.

    Raises:
        CollectiveError: a rank cannot read an object or has no room for it; on every rank alike, with the rank's name.
        CollectiveTimeout, PeerLost: as in `all_reduce`.
    """
    if group is not None:
        return [_over_network(delivery, group, group) for delivery in deliveries]
    here = session()
    folder = _folder_of(here)
    if folder is None:
        return [_over_network(delivery, here) for delivery in deliveries]
    handles = _leave_files(deliveries, folder, here)
    try:
        # One after the other: a deadline is for one object, however many there are.
        ways = zip(deliveries, handles, strict=True)
        return [_over_network(one, here) if handle is None else _by_file(one, handle, folder, here) for one, handle in ways]
    finally:
        for delivery, handle in zip(deliveries, handles, strict=True):
            if handle is not None and delivery.src == here.rank:
                folder.remove(handle.name)


def _over_network(delivery: Delivery, here: Members, group: Subgroup | None = None) -> Opened | None:
    move, device = _way(delivery, here, group)
    parcel = delivery.parcel
    head = torch.empty(delivery.sizes.head, dtype=torch.uint8, device="cpu") if delivery.is_for(here.rank) else None
    _stream(delivery.sizes.head, None if parcel is None else [head_as_tensor(parcel)], None if head is None else [head], move, device)
    opened = _on_all_ranks(here, f"receive the object of rank {delivery.src}", partial(_open, head, delivery, here), group)
    source = None if parcel is None else parcel.tensors
    target = None if opened is None else tuple(opened.tensors.values())
    _stream(delivery.sizes.payload, source, target, move, device)
    return opened


def _stream(
    size_bytes: int, source: Sequence[Tensor] | None, target: Sequence[Tensor] | None, move: Callable[[Tensor], None], device: torch.device
) -> None:
    """Moves `size_bytes` in chunks; a rank that neither has nor wants them takes part in each chunk all the same."""
    known = target if source is None else source
    sizes = [size_bytes] if known is None else [tensor.nbytes for tensor in known]
    stream(plan_chunks(sizes, CHUNK_BYTES), source, target, move, device)


def _open(head: Tensor | None, delivery: Delivery, here: Members) -> Opened | None:
    return None if head is None else Opened.read(head.numpy().tobytes(), delivery.sizes.payload, here.device)


def _way(delivery: Delivery, here: Members, group: Subgroup | None) -> tuple[Callable[[Tensor], None], torch.device]:
    """How a chunk moves, and where it must be for that."""
    if delivery.dst is None:
        return lambda chunk: _broadcast(chunk, delivery.src, group), here.device
    if delivery.dst == delivery.src:
        return _stay, _CPU
    return lambda chunk: _pass_on(chunk, delivery, here, group), here.device


def _broadcast(chunk: Tensor, src: int, group: Subgroup | None) -> None:
    broadcast(chunk, src, name=_NAME, group=group)


def _pass_on(chunk: Tensor, delivery: Delivery, here: Members, group: Subgroup | None) -> None:
    """Sends a chunk from one rank to one. All ranks go along: the deadline of those who wait is then one chunk, however large the object is."""
    if here.rank == delivery.src and delivery.dst is not None:
        send(chunk, delivery.dst, group=group)
    elif here.rank == delivery.dst:
        recv(chunk, delivery.src, group=group)
    barrier(group=group)


def _stay(chunk: Tensor) -> None:
    """The chunk is where it is wanted: the rank that has the object gets a copy."""


def _leave_files(deliveries: Sequence[Delivery], folder: Folder, here: Session) -> list[Handle | None]:
    """Writes the objects of this rank, and learns of those of the others; None for one that has no file and must go over the network."""
    mine = {index: _write(delivery.parcel, folder) for index, delivery in enumerate(deliveries) if delivery.parcel is not None}
    events.fault_point("object.written", rank=here.rank)
    told: dict[int, Any] = {}
    for notes in _tell_all([[index, note] for index, note in mine.items()], here):
        told |= dict(notes)
    failures = {deliveries[index].src: note for index, note in told.items() if isinstance(note, str)}
    if failures and here.rank == 0:
        rank, reason = next(iter(failures.items()))
        log.get_logger().warning("rank %d cannot write in %s: %s; its large objects go over the network", rank, folder.path, reason)
    return [None if isinstance(told[index], str) else Handle(*told[index]) for index in range(len(deliveries))]


def _write(parcel: Parcel, folder: Folder) -> Handle | str:
    """Writes an object; what readers must know of the file, or why there is none."""
    buffers = [head_as_tensor(parcel), *parcel.tensors]
    try:
        with folder.writing() as writer:
            _stream(parcel.sizes.total, buffers, None, lambda chunk: writer.write(chunk.numpy().data), _CPU)
        return writer.handle
    except (OSError, RuntimeError, MemoryError) as error:
        return _say(error)


def _by_file(delivery: Delivery, handle: Handle, folder: Folder, here: Session) -> Opened | None:
    return _on_all_ranks(
        here,
        f"read the object of rank {delivery.src} in {folder.path}",
        lambda: _read(delivery, handle, folder, here) if delivery.is_for(here.rank) else None,
    )


def _read(delivery: Delivery, handle: Handle, folder: Folder, here: Session) -> Opened:
    if handle.size_bytes != delivery.sizes.total:
        raise OSError(f"it must have {delivery.sizes.total} bytes, but {handle.size_bytes} were written")
    with folder.reading(handle) as reader:
        head = torch.empty(delivery.sizes.head, dtype=torch.uint8, device="cpu")
        _fill([head], reader)
        opened = Opened.read(head.numpy().tobytes(), delivery.sizes.payload, here.device)
        _fill(tuple(opened.tensors.values()), reader)
    return opened


def _fill(target: Sequence[Tensor], reader: Reader) -> None:
    _stream(0, None, target, lambda chunk: reader.fill(chunk.numpy().data), _CPU)


def _folder_of(here: Session) -> Folder | None:
    """The folder that all ranks see; None if there is none. Looked for once a session, by all ranks together."""
    shared = here.shared
    if not shared.settled and here.world_size > 1:
        bases = _tell_all(None if shared.base is None else str(shared.base), here)
        without = [rank for rank, base in enumerate(bases) if base is None]
        if not without:
            shared.folder = _find_folder(here)
        elif len(without) < here.world_size:
            _warn(here, f"{say_ranks(without)} {'has' if len(without) == 1 else 'have'} no shared directory")
        shared.settled = True
    return shared.folder


def _find_folder(here: Session) -> Folder | None:
    assert here.shared.base is not None
    base, folder, problem = here.shared.base, None, ""
    if here.rank == 0:
        folder, problem = _try(lambda: Folder.make(base))
    name, *_ = _tell_all(None if folder is None else folder.path.name, here)
    if here.rank != 0 and name is not None:
        folder, problem = _try(lambda: Folder.open(base, name))
    found = _tell_all([None if folder is None else folder.token, problem], here)
    blind = [rank for rank, (token, _) in enumerate(found) if token is None or token != found[0][0]]
    if not blind:
        return folder
    if folder is not None:
        folder.close()
    _warn(here, f"{say_ranks(blind)} cannot use the folder that rank 0 made in {base}: {found[blind[0]][1] or 'it is another one'}")
    return None


def _try(act: Callable[[], _T]) -> tuple[_T | None, str]:
    """What `act` gives; or None, and why it gives nothing."""
    try:
        return act(), ""
    except (OSError, ValueError) as error:
        return None, _say(error)


def _warn(here: Session, what: str) -> None:
    if here.rank == 0:
        log.get_logger().warning("%s; large objects go over the network", what)


def _on_all_ranks(here: Members, what: str, act: Callable[[], _T], group: Subgroup | None = None) -> _T:
    """Does `act` on this rank; raises what went wrong on any.

    Collective.
    """
    result, problem = _try_anything(act)
    problems = _tell_all(problem, here, group)
    failed = [rank for rank, text in enumerate(problems) if text]
    if failed:
        raise CollectiveError(f"{say_ranks(failed)} could not {what}: {problems[failed[0]]}")
    assert result is not None
    return result[0]


def _try_anything(act: Callable[[], _T]) -> tuple[tuple[_T] | None, str]:
    try:
        return (act(),), ""
    except Exception as error:
        return None, _say(error)


def _say(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:_LONGEST_REASON]


def _tell_all(note: Any, here: Members, group: Subgroup | None = None) -> list[Any]:
    """What each rank has to say, as plain data.

    Collective.
    """
    content = torch.frombuffer(bytearray(json.dumps(note).encode()), dtype=torch.uint8).to(here.device)
    return [json.loads(told.cpu().numpy().tobytes()) for told in all_gather(content, name=_NAME, group=group)]
