"""A tree ready to be sent: a head of JSON that says what it is, and the tensors in it, which stay where they are until they are on their way.

What is small travels as one letter: the length of its JSON (8 bytes), the JSON, the bytes of the tensors behind one another. The letter of a
large one announces its sizes only; its bytes then come in chunks, which are put straight into the tensors that the head describes. The letter of
a rank that has nothing it could send says why.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hora.comm.arrays import bytes_as_tensor
from hora.comm.codec import Tree, decode, encode
from hora.comm.dealt_out import require_whole
from hora.comm.dtypes import DTYPES, dtype_name
from hora.errors import ConfigError

_T = TypeVar("_T")
_LENGTH_BYTES = 8
_LONGEST_REASON = 4000


class Sizes(NamedTuple):
    """What a large object needs, in bytes."""

    head: int
    payload: int

    @property
    def total(self) -> int:
        """Of everything."""
        return self.head + self.payload


@dataclass(frozen=True)
class Parcel:
    """An object to be sent: its head, and its tensors, of any device and layout in memory."""

    head: bytes
    tensors: tuple[Tensor, ...]

    @classmethod
    def pack(cls, obj: Tree, max_bytes: int, place: tuple[str, ...] = ()) -> "Parcel":
        """Takes an object apart, which stands at `place` in something larger; copies no tensor.

        Raises:
            ConfigError: something in it cannot be sent, or it is larger than `max_bytes`.
        """
        skeleton, tensors = encode(obj, place)
        require_whole(tensors.items(), "an object sent between ranks holds whole tensors", "send its to_local() or full_tensor()")
        for name, tensor in tensors.items():
            if dtype_name(tensor.dtype) not in DTYPES:
                raise ConfigError(f"{name} must be a tensor of a type that can be sent, but is {tensor.dtype}; convert it first")
        entries = [[name, dtype_name(tensor.dtype), list(tensor.shape), tensor.device.type] for name, tensor in tensors.items()]
        parcel = cls(json.dumps({"tree": skeleton, "tensors": entries}, allow_nan=False).encode(), tuple(tensors.values()))
        if parcel.sizes.total > max_bytes:
            raise ConfigError(
                f"an object sent between ranks must have at most {max_bytes} bytes, but has {parcel.sizes.total}; send its tensors with "
                "hora.broadcast or hora.all_gather, or raise max_bytes"
            )
        return parcel

    @property
    def sizes(self) -> Sizes:
        """Bytes of the head and of all tensors."""
        return Sizes(len(self.head), sum(tensor.nbytes for tensor in self.tensors))

    def letter(self, inline_bytes: int) -> Tensor:
        """The letter, `uint8` on the CPU: all of the object if it has no more than `inline_bytes`, else its sizes."""
        if self.sizes.total > inline_bytes:
            return _letter(json.dumps({"large": self.sizes}).encode())
        return _letter(self.head, *(flat_bytes(tensor).cpu() for tensor in self.tensors))


@dataclass(frozen=True)
class Refusal:
    """Why a rank has nothing it could send."""

    reason: str

    def letter(self, inline_bytes: int) -> Tensor:  # noqa: ARG002 (as that of a parcel)
        """The letter, `uint8` on the CPU."""
        return _letter(json.dumps({"refusal": self.reason}).encode())


def pack_or_refuse(pack: Callable[[], Parcel]) -> Parcel | Refusal:
    """What `pack` gives, or why it gives nothing: the other ranks wait for a letter in any case."""
    try:
        return pack()
    except ConfigError as error:
        return Refusal(str(error)[:_LONGEST_REASON])
    except Exception as error:
        return Refusal(f"it cannot be taken apart: {type(error).__name__}: {error}"[:_LONGEST_REASON])


@dataclass(frozen=True)
class Opened:
    """An object that has arrived or is about to: its tree around tensors that have their place in memory, and their values as soon as they come."""

    skeleton: Any
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, head: bytes, payload_bytes: int, device: torch.device) -> "Opened":
        """Reads a head and makes room for the tensors: on `device` for those that came from a device of its kind, else on the CPU.

        Raises:
            ConfigError: it is no head that `Parcel` makes, or one of tensors that do not have `payload_bytes` together.
        """
        return _checked(lambda: cls._read(json.loads(head), payload_bytes, device))

    @classmethod
    def _read(cls, said: Any, payload_bytes: int, device: torch.device) -> "Opened":
        entries = [(name, DTYPES[dtype], _shape(shape), kind) for name, dtype, shape, kind in said["tensors"]]
        size = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape, _ in entries)
        if size != payload_bytes:
            raise ValueError(f"its tensors have {size} bytes, and {payload_bytes} were announced")
        places = {name: device if kind == device.type else torch.device("cpu") for name, _, _, kind in entries}
        return cls(said["tree"], {name: torch.empty(shape, dtype=dtype, device=places[name]) for name, dtype, shape, _ in entries})

    def fill(self, content: Tensor) -> None:
        """Copies the bytes of all tensors from `content`."""
        begin = 0
        for tensor in self.tensors.values():
            flat_bytes(tensor).copy_(content[begin : begin + tensor.nbytes])
            begin += tensor.nbytes

    def tree(self) -> Tree:
        """Puts the object together.

        Raises:
            ConfigError: there is no such object.
        """
        return _checked(lambda: decode(self.skeleton, self.tensors))


class Letter:
    """A letter that came.

    Attributes:
        refusal: why there is nothing to send; None if there is.
        large: the sizes of what is still to come; None if all is here.

    Raises:
        ConfigError: it is no letter that `Parcel` or `Refusal` makes.
    """

    def __init__(self, content: Tensor) -> None:
        content = content.cpu()
        self._end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES].numpy().tobytes(), "big")
        self._content = content
        self._head = content[_LENGTH_BYTES : self._end].numpy().tobytes()
        said = _checked(lambda: dict(json.loads(self._head)))
        self.refusal: str | None = _checked(lambda: str(said["refusal"])) if "refusal" in said else None
        self.large: Sizes | None = _checked(lambda: Sizes(*_shape(said["large"]))) if "large" in said else None

    def open(self, device: torch.device) -> Tree:
        """The object of a letter that holds one.

        Raises:
            ConfigError: there is none.
        """
        payload = self._content[self._end :]
        opened = Opened.read(self._head, payload.numel(), device)
        opened.fill(payload)
        return opened.tree()


def flat_bytes(tensor: Tensor) -> Tensor:
    """The elements of `tensor` in order as `uint8` [size in bytes], on its device; shares the memory of a contiguous tensor."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


class Part(NamedTuple):
    """A piece of one tensor, in bytes."""

    buffer: int
    begin: int
    end: int


def plan_chunks(sizes: Sequence[int], chunk_bytes: int) -> Iterator[list[Part]]:
    """Cuts buffers of `sizes` bytes, taken as one stream, into chunks of `chunk_bytes`; the last may be shorter.

    Where a chunk begins and ends depends on the sum of the sizes only.
    """
    parts: list[Part] = []
    room = chunk_bytes
    for buffer, size in enumerate(sizes):
        begin = 0
        while begin < size:
            end = min(size, begin + room)
            parts.append(Part(buffer, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield parts
                parts, room = [], chunk_bytes
    if parts:
        yield parts


class FlatTensors:
    """Tensors as flat bytes, made one at a time: only those with gaps in memory are copied, and of these one is kept."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._last: tuple[int, Tensor] | None = None

    def part(self, part: Part) -> Tensor:
        """The bytes of a part, a view."""
        if self._last is None or self._last[0] != part.buffer:
            self._last = None
            self._last = part.buffer, flat_bytes(self._tensors[part.buffer])
        return self._last[1][part.begin : part.end]


def stream(
    plan: Iterator[list[Part]],
    source: Sequence[Tensor] | None,
    target: Sequence[Tensor] | None,
    move: Callable[[Tensor], None],
    device: torch.device,
) -> None:
    """Moves buffers chunk by chunk.

    Args:
        plan: the chunks.
        source: the buffers to be sent, on a rank that has them.
        target: contiguous tensors to be overwritten, on a rank that wants them; may be beside a `source` of the same shapes.
        move: sends or receives a chunk, `uint8` on `device`; without source and target it is given an empty one.
        device: where chunks are to be.
    """
    sent = None if source is None else FlatTensors(source)
    received = None if target is None else FlatTensors(target)
    for parts in plan:
        chunk, staged = _chunk(parts, sent, received, device)
        move(chunk)
        if received is not None and staged:
            for part, piece in zip(parts, chunk.split([part.end - part.begin for part in parts]), strict=True):
                received.part(part).copy_(piece)


def _chunk(parts: list[Part], source: FlatTensors | None, target: FlatTensors | None, device: torch.device) -> tuple[Tensor, bool]:
    """The chunk to be moved, and whether it has memory of its own. What `source` has is in it."""
    carrier = target or source
    if carrier is None:
        return torch.empty(0, dtype=torch.uint8, device=device), False
    if len(parts) == 1 and (view := carrier.part(parts[0])).device.type == device.type:
        if source is not None and target is not None:
            view.copy_(source.part(parts[0]))
        return view, False
    chunk = torch.empty(sum(part.end - part.begin for part in parts), dtype=torch.uint8, device=device)
    if source is not None:
        for part, piece in zip(parts, chunk.split([part.end - part.begin for part in parts]), strict=True):
            piece.copy_(source.part(part))
    return chunk, True


def head_as_tensor(parcel: Parcel) -> Tensor:
    """The head as `uint8` [size]."""
    return bytes_as_tensor(parcel.head)


def _letter(head: bytes, *payload: Tensor) -> Tensor:
    return torch.cat([torch.frombuffer(bytearray(len(head).to_bytes(_LENGTH_BYTES, "big") + head), dtype=torch.uint8), *payload])


def _shape(sizes: Any) -> list[int]:
    if not isinstance(sizes, list) or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError(f"sizes cannot be {sizes}")
    return sizes


def _checked(read: Callable[[], _T]) -> _T:
    try:
        return read()
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"an object between ranks must be one that hora packed, but this is not: {type(error).__name__}: {error}"
        ) from error
