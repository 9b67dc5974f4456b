"""Every rank says who it is and reads who the others are, before a process group is made.

So that a rank that does not come, comes twice, or comes with another version or another number of ranks is named at once, by number and
host, instead of showing later as a hang. Relies on a store that all ranks share.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

from hora.comm.deadline import Deadline
from hora.comm.records import Record, say_ranks
from hora.comm.torch_private import Store
from hora.errors import CollectiveMismatch, ConfigError, PeerLost, RendezvousTimeout

_POLL_S = 0.01
_LOOK_S = 0.5


_ARRIVED, _REFUSAL = "arrived", "refusal"

# What must be the same on all ranks.
_COMMON = ("world_size", "backend", "device_type", "hora", "torch", "python", "script", "exact", "check_calls")


Ended = Callable[[Sequence[int]], Sequence[int]]
"""Tells which of some ranks have ended, and come no more."""


def exchange_records(store: Store, mine: Record, deadline: Deadline, hint: str, ended: Ended = lambda _: ()) -> list[Record]:
    """Leaves `mine` in the store and returns the records of all ranks, by rank.

    Collective: all ranks call it.

    Args:
        store: shared by all ranks, empty of records.
        mine: this rank's.
        deadline: until when the others must have come.
        hint: what the user can do about ranks that do not come.
        ended: which of them cannot come any more.

    Raises:
        ConfigError: another process has this rank, or the store holds records of an earlier job.
        CollectiveMismatch: ranks differ in what must be the same.
        RendezvousTimeout: ranks are missing at the deadline; the message names them.
        PeerLost: a rank that is missing has ended.
    """
    try:
        return _exchange(store, mine, deadline, hint, ended)
    except (RendezvousTimeout, PeerLost):
        # A rank that tries again must not meet its own traces.
        with suppress(RuntimeError):
            if store.add(_claim(mine.rank), -1) == 0:
                store.delete_key(_record(mine.rank))
                store.add(_ARRIVED, -1)
        raise


def _exchange(store: Store, mine: Record, deadline: Deadline, hint: str, ended: Ended) -> list[Record]:
    if store.add(_claim(mine.rank), 1) > 1:
        refusal = _refuse_second(store, mine, hint)
        store.set(_REFUSAL, refusal)
        raise ConfigError(refusal)
    store.set(_record(mine.rank), json.dumps(asdict(mine)))
    store.add(_ARRIVED, 1)
    records: dict[int, Record] = {mine.rank: mine}
    while missing := [rank for rank in range(mine.world_size) if rank not in records]:
        _await_arrivals(store, mine.world_size, deadline)
        records |= _read(store, missing)
        check_agreement(mine, list(records.values()))
        if len(records) < mine.world_size:
            _give_up_if_hopeless(store, mine, sorted(set(missing) - set(records)), deadline, hint, ended)
    return [records[rank] for rank in range(mine.world_size)]


def _await_arrivals(store: Store, world_size: int, deadline: Deadline) -> None:
    """Returns when so many ranks have come, or after a while."""
    look = Deadline(min(_LOOK_S, deadline.remaining_s))
    # Asking again is quieter than Store.wait, which makes torch's TCPStore print a warning from C++ when nobody answers. The more ranks ask,
    # the more rarely each does.
    pause_s = max(_POLL_S, _POLL_S * world_size / 50)
    while not look.passed:
        if store.add(_ARRIVED, 0) >= world_size:
            break
        time.sleep(pause_s)


def _read(store: Store, ranks: Sequence[int]) -> dict[int, Record]:
    """The records of those of `ranks` that have come."""
    keys = [_record(rank) for rank in ranks]
    if store.check(keys):
        values = store.multi_get(keys)
    else:
        ranks = [rank for rank in ranks if store.check([_record(rank)])]
        values = [store.get(_record(rank)) for rank in ranks]
    return {rank: Record(**json.loads(value)) for rank, value in zip(ranks, values, strict=True)}


def _give_up_if_hopeless(store: Store, mine: Record, missing: Sequence[int], deadline: Deadline, hint: str, ended: Ended) -> None:
    if store.check([_REFUSAL]):
        raise ConfigError(store.get(_REFUSAL).decode())
    # One that has come and ended since left its record, and shows later as lost.
    if gone := [rank for rank in ended(missing) if not store.check([_record(rank)])]:
        raise PeerLost(
            f"rank {mine.rank} waits for {say_ranks(gone)} of {mine.world_size} in vain: {'they have' if len(gone) > 1 else 'it has'} ended, with "
            f"exit code 0; all ranks must make the same calls, or end together; {hint}"
        )
    if deadline.passed:
        raise RendezvousTimeout(
            f"rank {mine.rank} waited {deadline.waited_s:.1f} s for {say_ranks(missing)} of {mine.world_size}; {hint}, "
            "or give more time with timeout_s"
        )
    time.sleep(_POLL_S)


def _refuse_second(store: Store, mine: Record, hint: str) -> str:
    known = _read(store, [mine.rank])
    first = "".join(f" (process {record.pid} on {record.host} was first)" for record in known.values())
    return f"two processes came as rank {mine.rank} of {mine.world_size}{first}: each rank must come once; {hint}"


def _claim(rank: int) -> str:
    return f"claim/{rank}"


def _record(rank: int) -> str:
    return f"record/{rank}"


def _common(record: Record) -> dict[str, object]:
    return {field: getattr(record, field) for field in _COMMON} | {f"config.{name}": value for name, value in record.config.items()}


def check_agreement(mine: Record, others: Sequence[Record]) -> None:
    """Refuses ranks that differ in what must be the same everywhere.

    Raises:
        CollectiveMismatch: names each field, both values and both ranks.
    """
    ours = _common(mine)
    differences = [
        f"{field} is {ours.get(field, 'absent')} on rank {mine.rank} ({mine.host}) but {theirs.get(field, 'absent')} on rank {other.rank} "
        f"({other.host})"
        for other in sorted(others, key=lambda record: record.rank)
        for theirs in [_common(other)]
        for field in {**ours, **theirs}
        if theirs.get(field) != ours.get(field)
    ]
    if differences:
        raise CollectiveMismatch("all ranks must be started alike: " + "; ".join(differences))
