"""Strategy `sharded`: each rank keeps the optimizer's state of its share of the parameters, and updates that share alone.

A bucket is reduced and scattered instead of all-reduced: a rank gets the sum of its chunk. It updates that chunk of the parameters, and the
chunks are gathered. The bytes are those of an all-reduce; the state takes 1/n of the memory, and the update 1/n of the time (Rajbhandari et al.,
ZeRO, SC'20, stage 1). The optimizer must be elementwise: an update of a slice is then the slice of the update, to the last bit.

A parameter that lies across the border of two chunks is updated by both ranks, each its slice. Every slice is a parameter of its own to the
optimizer that makes the update, so that parameters without a gradient are left alone, and groups have their own settings.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from hora import events
from hora.comm.flat import all_gather_flat, all_reduce_flat, reduce_scatter_flat
from hora.comm.objects import all_gather_object
from hora.comm.session import Session
from hora.comm.torch_private import OwnStepHook
from hora.comm.work import Work
from hora.errors import ConfigError
from hora.sync.gradients import GradientBucket, copy_all
from hora.sync.narrow import make_sums
from hora.sync.sums import NativeSums

_ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Adamax,
    torch.optim.NAdam, torch.optim.RAdam,
)  # fmt: skip

_DEALT_OUT = "_hora_dealt_out"
"""The attribute of the user's optimizer that says who has its state."""

_CHUNK = 16
"""Elements of which chunks are whole multiples, so that a GPU reads them 16 bytes at a time."""


@dataclass(frozen=True)
class Piece:
    """What this rank updates of one parameter.

    Attributes:
        parameter: the model's.
        member: its place in the bucket.
        elements: which of its elements, in the order of memory.
        shard: these, as a parameter of the optimizer.
        gradient: theirs.
    """

    parameter: nn.Parameter
    member: int
    elements: range
    shard: nn.Parameter
    gradient: Tensor


class ShardedBucket(GradientBucket):
    """A bucket of which this rank has one chunk, `sums` and `values`; the buffer serves gradients on their way there, then parameters."""

    dealt_out = True

    def __init__(self, parameters: Sequence[nn.Parameter], lanes: Tensor, rank: int, world_size: int):
        super().__init__(parameters, _CHUNK * world_size, lanes)
        size = self.buffer.numel() // world_size
        self.sums = self.buffer.new_zeros(size)
        self.values = self.buffer.new_zeros(size)
        self.pieces = list(self._cut(range(rank * size, (rank + 1) * size)))

    def _cut(self, mine: range) -> Iterator[Piece]:
        begin = 0
        for member, parameter in enumerate(self.parameters):
            first, last = max(begin, mine.start), min(begin + parameter.numel(), mine.stop)
            if first < last:
                place = slice(first - mine.start, last - mine.start)
                shard = nn.Parameter(self.values[place])
                yield Piece(parameter, member, range(first - begin, last - begin), shard, self.sums[place])
            begin += parameter.numel()

    @override
    def begin_sum(self, *, waits: bool = False) -> Work:
        """Begins to reduce and scatter. Collective. `waits`: the caller waits for it now."""
        return reduce_scatter_flat(self.sums, self.buffer, waits=waits)

    @override
    def unpack(self) -> None:
        """Gives the pieces their gradients; the parameters have none, since nobody has all of it."""
        absent = self.absent()
        for piece in self.pieces:
            piece.shard.grad = None if piece.member in absent else piece.gradient
        for parameter in self.parameters:
            parameter.grad = None

    @override
    def put_aside(self) -> None:
        for piece in self.pieces:
            piece.shard.grad = None

    @torch.no_grad()
    def load(self) -> None:
        """Takes the parameters as they are now, whoever has changed them."""
        copy_all([piece.shard.detach() for piece in self.pieces], [_elements(piece.parameter, piece.elements) for piece in self.pieces])

    def gather(self) -> Work:
        """Begins to give all ranks the chunks of all. Collective."""
        return all_gather_flat(self.buffer, self.values)

    @torch.no_grad()
    def spread(self) -> None:
        """Puts what was gathered into the parameters."""
        copy_all([parameter.detach() for parameter in self.parameters], self.views)


class ShardedSums:
    """The sums of chunks as `sums` makes them, and beside the last those of the lanes, which tell whether a parameter has a gradient anywhere."""

    def __init__(self, sums: NativeSums, lanes: Tensor):
        self._sums = sums
        self._lanes = lanes
        self.begin, self.takes_early, self.take, self.send = sums.begin, sums.takes_early, sums.take, sums.send

    def arrivals(self) -> Iterator[int]:
        """The lanes travel beside the last buckets, or behind them where a thread would have to wake for that."""
        lanes = None if self._sums.in_threads else all_reduce_flat(self._lanes)
        yield from self._sums.arrivals()
        (all_reduce_flat(self._lanes, waits=True) if lanes is None else lanes).wait()


def make_sharded(
    parameters: Sequence[Sequence[nn.Parameter]], here: Session, wire_dtype: torch.dtype | None
) -> tuple[list[ShardedBucket], ShardedSums]:
    """The buckets of `parameters`, and their sums, which travel as `wire_dtype` (None: as they are).

    Raises:
        ConfigError: the session is exact.
    """
    if here.exact is not None:
        raise ConfigError(
            'strategy "sharded" sums in the order of the backend, and exact mode in its own; use "overlap" or "deferred" in exact mode'
        )
    first = parameters[0][0]
    lanes = torch.zeros(sum(map(len, parameters)), device=first.device)
    parts = lanes.split([len(members) for members in parameters])
    buckets = [ShardedBucket(members, part, here.rank, here.world_size) for members, part in zip(parameters, parts, strict=True)]
    return buckets, ShardedSums(make_sums(buckets, wire_dtype, here), lanes)


@dataclass
class _DealtOut:
    """Who has the state of an optimizer; kept with that, and weak, so that the memory is free when nobody trains with it any more."""

    by: "weakref.ref[ShardedUpdate]"
    updated: bool = False


def take_state_back(optimizer: torch.optim.Optimizer) -> None:
    """Gives `optimizer` the whole state again that a `ShardedUpdate` has dealt out, which is over then. Collective in that case.

    Raises:
        ConfigError: it has made updates and is gone, and the state with it.
    """
    dealt_out: _DealtOut | None = getattr(optimizer, _DEALT_OUT, None)
    if dealt_out is None:
        return
    sharded = dealt_out.by()
    if all(all_gather_object(sharded is not None)) and sharded is not None:  # garbage is not collected on all ranks at once
        sharded.give_back()
    elif dealt_out.updated:
        raise ConfigError(
            'under strategy "sharded" the state of an optimizer is with its DistributedOptimizer, but that is gone: keep it until the next one is '
            "made, or make a new optimizer and load what its state_dict() gave"
        )


class ShardedUpdate:
    """The update of this rank's pieces by an optimizer like the user's, which keeps groups and settings, and no state.

    Whoever asks the user's optimizer itself for its `state_dict` gets all of it, and what is loaded there is dealt out.

    Args:
        optimizer: the user's.
        buckets: of its model.

    Raises:
        ConfigError: it is not elementwise, or does not have all trainable parameters of the model.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, buckets: Sequence[ShardedBucket]):
        _require_elementwise(optimizer)
        self._optimizer = optimizer
        self._buckets = buckets
        self._positions = {
            id(parameter): position for position, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
        }
        _require_all(self._positions, [parameter for bucket in buckets for parameter in bucket.parameters])
        pieces: dict[int, list[nn.Parameter]] = {id(parameter): [] for bucket in buckets for parameter in bucket.parameters}
        for piece in self._pieces():
            pieces[id(piece.parameter)].append(piece.shard)
        make: Any = type(optimizer)
        self.inner: torch.optim.Optimizer = make(
            [
                {**_settings(group), "params": [shard for parameter in group["params"] for shard in pieces.get(id(parameter), [])]}
                for group in optimizer.param_groups
            ]
        )
        self._gathered: list[tuple[ShardedBucket, Work]] = []
        self._updates = False
        self._dealt_out = _DealtOut(weakref.ref(self))
        setattr(optimizer, _DEALT_OUT, self._dealt_out)
        self._take_state()
        self._handles = self._listen()

    def clip(self, clip_norm: float | None) -> Tensor | None:
        """Scales the gradient to the 2-norm `clip_norm` at most; its norm over all ranks. Collective unless `clip_norm` is None."""
        if clip_norm is None:
            return None
        shards = [piece.shard for piece in self._pieces()]
        gradients = [shard.grad for shard in shards if shard.grad is not None]
        first = self._buckets[0].sums
        own = nn.utils.get_total_norm(gradients) if gradients else first.new_zeros(())
        square = own.double().square().reshape(1)
        all_reduce_flat(square, waits=True).wait()
        norm = square[0].sqrt().to(first.dtype)
        nn.utils.clip_grads_with_norm_(shards, clip_norm, norm)
        return norm

    def update(self) -> None:
        """Updates the pieces and gives all ranks the new parameters. Collective.

        It is made inside a step of the user's optimizer, which has no gradients and changes nothing: its hooks run before and after, and schedulers
        that were made for it see it step.
        """
        self._require_state()
        last_before = self._optimizer.register_step_pre_hook(lambda *_: self._update_pieces())
        self._updates = True
        try:
            self._optimizer.step()
        finally:
            self._updates = False
            last_before.remove()

    def _update_pieces(self) -> None:
        self._optimizer.zero_grad()
        self.begin()
        self.step(self._buckets)
        self.end()

    def begin(self) -> None:
        """An update begins, with the settings that the user's optimizer has now.

        Raises:
            ConfigError: the state was given back.
        """
        self._require_state()
        self._dealt_out.updated = True
        for group, own in zip(self._optimizer.param_groups, self.inner.param_groups, strict=True):
            own.update(_settings(group))
        self._gathered = []

    def step(self, buckets: Iterable[GradientBucket]) -> None:
        """Updates the pieces of these buckets, no others having a gradient, and begins to give all ranks their new parameters. Collective."""
        mine = [bucket for bucket in buckets if isinstance(bucket, ShardedBucket)]
        for bucket in mine:
            bucket.load()
        self.inner.step()
        self._gathered += [(bucket, bucket.gather()) for bucket in mine]

    def end(self) -> None:
        """All ranks have all new parameters. Collective."""
        for bucket, work in self._gathered:
            events.observer().on_mark(events.Mark.GATHER_BEGIN)
            work.wait()
            events.observer().on_mark(events.Mark.GATHER_END)
            bucket.spread()

    # State ------------------------------------------------------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Puts the whole state back into the user's optimizer, and makes no update any more. Collective."""
        whole = self._optimizer.state_dict()
        for handle in self._handles:
            handle.remove()
        self._handles = ()
        delattr(self._optimizer, _DEALT_OUT)
        self._optimizer.load_state_dict(whole)
        self.inner.state.clear()

    def _listen(self) -> tuple[RemovableHandle, ...]:
        weak_self = weakref.ref(self)

        def complete(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            if (sharded := weak_self()) is not None:
                sharded._complete(state_dict)

        def deal_out(_: torch.optim.Optimizer) -> None:
            if (sharded := weak_self()) is not None:
                sharded._take_state()

        def refuse() -> None:
            if (sharded := weak_self()) is not None and not sharded._updates:
                raise ConfigError(
                    'under strategy "sharded" the step of the optimizer that DistributedOptimizer was made of changes nothing, since the gradients '
                    "are dealt out: call step() of the DistributedOptimizer"
                )

        return (
            self._optimizer.register_state_dict_post_hook(complete),
            self._optimizer.register_load_state_dict_post_hook(deal_out),
            self._optimizer.register_step_pre_hook(OwnStepHook(refuse)),
        )

    def _complete(self, whole: dict[str, Any]) -> None:
        """Adds the state to what the user's optimizer says without it, as if that had made the updates. Collective."""
        entries = self._entries()
        for bucket in self._buckets:
            places = [self._positions[id(parameter)] for parameter in bucket.parameters]
            for key, dtype in sorted(
                {(key, value) for place in places for key, value in entries.get(place, {}).items() if isinstance(value, str)}
            ):
                full = self._gather(bucket, key, getattr(torch, dtype))
                for place, view in zip(places, full, strict=True):
                    if key in entries.get(place, {}):
                        whole["state"].setdefault(place, {})[key] = view.clone()
        for place, entry in entries.items():
            scalars = {key: value for key, value in entry.items() if not isinstance(value, str)}
            whole["state"].setdefault(place, {}).update(scalars)

    def _require_state(self) -> None:
        if not self._handles:
            raise ConfigError(
                'under strategy "sharded" one DistributedOptimizer has the state of an optimizer, but another one was made of it since: use that'
            )

    def _take_state(self) -> None:
        """Moves the state that the user's optimizer has to the pieces."""
        self.inner.state.clear()
        for piece in self._pieces():
            if state := self._optimizer.state.get(piece.parameter):
                self.inner.state[piece.shard] = {key: _part(key, value, piece) for key, value in state.items()}
        self._dealt_out.updated |= bool(self._optimizer.state)
        self._optimizer.state.clear()

    def _entries(self) -> dict[int, dict[str, Any]]:
        """The state of each parameter by its place in the groups: values that are one for all of it, the types of others. Collective."""
        mine: dict[int, dict[str, Any]] = {}
        for piece in self._pieces():
            for key, value in self.inner.state.get(piece.shard, {}).items():
                split = _is_split(key, value, piece.shard)
                entry = mine.setdefault(self._positions[id(piece.parameter)], {})
                entry[key] = str(value.dtype).removeprefix("torch.") if split else value
        found: dict[int, dict[str, Any]] = {}
        for told in all_gather_object(mine):
            for place, entry in told.items():
                found.setdefault(place, entry)
        return found

    def _gather(self, bucket: ShardedBucket, key: str, dtype: torch.dtype) -> list[Tensor]:
        """One value of the state of all parameters of a bucket, in their shapes. Collective."""
        chunk = torch.zeros_like(bucket.values, dtype=dtype)
        for piece in bucket.pieces:
            value = self.inner.state.get(piece.shard, {}).get(key)
            if value is not None:
                begin = piece.shard.storage_offset()
                chunk[begin : begin + len(piece.elements)] = value
        full = torch.empty_like(bucket.buffer, dtype=dtype)
        all_gather_flat(full, chunk).wait()
        return bucket.views_of(full)

    def _pieces(self) -> Iterator[Piece]:
        for bucket in self._buckets:
            yield from bucket.pieces


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _is_split(key: str, value: Any, shard: nn.Parameter) -> bool:
    """Whether a value of the state has an element for each of the parameter's."""
    return isinstance(value, Tensor) and key != "step" and value.shape == shard.shape


def _part(key: str, value: Any, piece: Piece) -> Any:
    if isinstance(value, Tensor) and key != "step" and value.shape == piece.parameter.shape:
        return _elements(value, piece.elements).clone()
    return value.clone() if isinstance(value, Tensor) else value


def _elements(tensor: Tensor, elements: range) -> Tensor:
    """Some elements in the order of memory; where that has gaps, of rows."""
    flat = tensor.detach()
    dense = torch.empty_like(flat, device="meta").stride() == flat.stride()
    flat = flat.as_strided((flat.numel(),), (1,)) if dense else flat.reshape(-1)
    return flat[elements.start : elements.stop]


def _require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    if type(optimizer) not in _ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
        raise ConfigError(
            f'strategy "sharded" updates slices of parameters, which is right for optimizers that treat each element alone ({names}); '
            f'{type(optimizer).__name__} is not known to be one: use strategy "overlap"'
        )


def _require_all(positions: Mapping[int, int], parameters: Sequence[nn.Parameter]) -> None:
    missing = sum(id(parameter) not in positions for parameter in parameters)
    if missing:
        raise ConfigError(
            f'strategy "sharded" wants one optimizer with all trainable parameters of the model, but {missing} of {len(parameters)} are not in '
            'this one: freeze them, or use strategy "overlap"'
        )
