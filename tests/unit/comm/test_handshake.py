import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
from rank_records import record

from hora.comm.deadline import Deadline
from hora.comm.handshake import check_agreement, exchange_records
from hora.comm.records import Record
from hora.comm.torch_private import HashStore
from hora.errors import CollectiveMismatch, ConfigError, PeerLost, RendezvousTimeout

HINT = "start them"


def meet(*records: Record, timeout_s: float = 20.0, store: HashStore | None = None) -> list[Callable[[], list[Record]]]:
    """Has each of `records` join, in a thread each; calling a result returns or raises."""
    store = store or HashStore()
    with ThreadPoolExecutor(len(records)) as pool:
        futures = [pool.submit(exchange_records, store, mine, Deadline(timeout_s), HINT) for mine in records]
    return [future.result for future in futures]


def test_all_ranks_learn_all_records():
    records = [record(rank) for rank in range(3)]
    assert [result() for result in meet(*reversed(records))] == [records] * 3


def test_missing_ranks_are_named_with_what_to_do():
    (result,) = meet(record(1), timeout_s=0.1)
    with pytest.raises(RendezvousTimeout, match=r"rank 1 waited 0\.\d s for ranks 0 and 2 of 3; start them, or give more time"):
        result()


def test_a_rank_that_has_ended_is_not_waited_for():
    store, asked = HashStore(), []

    def ended(ranks: Sequence[int]) -> list[int]:
        asked.append(list(ranks))
        return [2]

    with pytest.raises(PeerLost, match=r"rank 1 waits for rank 2 of 3 in vain: it has ended, with exit code 0.*; start them"):
        exchange_records(store, record(1), Deadline(60.0), HINT, ended)
    assert asked == [[0, 2]]
    assert store.add("arrived", 0) == 0, "a rank that tries again must not meet its own traces"


def test_a_rank_that_has_come_before_it_ended_is_there():
    store, records = HashStore(), [record(rank) for rank in range(3)]

    def ended(ranks: Sequence[int]) -> list[int]:  # at this very moment
        for rank in ranks:
            store.set(f"record/{rank}", json.dumps(asdict(records[rank])))
        return list(ranks)

    assert exchange_records(store, records[0], Deadline(60.0), HINT, ended) == records


def test_rank_that_comes_twice_is_refused_and_the_others_are_told():
    first, second, other = meet(record(0), record(0), record(1))
    refused = []
    for result in (first, second, other):
        with pytest.raises(ConfigError, match="two processes came as rank 0 of 3") as caught:
            result()
        refused.append(str(caught.value))
    assert len(set(refused)) == 1


def test_records_of_an_earlier_job_are_refused():
    store = HashStore()
    for rank in range(3):
        store.add(f"claim/{rank}", 1)
        store.set(f"record/{rank}", json.dumps(asdict(record(rank))))
    (result,) = meet(record(2), store=store)
    with pytest.raises(ConfigError, match=r"rank 2 of 3 \(process 102 on node1 was first\)"):
        result()


def test_rank_that_gave_up_is_missing_to_those_who_come_later():
    store = HashStore()
    for mine, absent in ((record(1), "ranks 0 and 2"), (record(0), "ranks 1 and 2")):
        (result,) = meet(mine, timeout_s=0.1, store=store)
        with pytest.raises(RendezvousTimeout, match=absent):
            result()


def test_ranks_that_gave_up_can_try_again():
    store = HashStore()
    (result,) = meet(record(1), timeout_s=0.1, store=store)
    with pytest.raises(RendezvousTimeout):
        result()
    records = [record(rank) for rank in range(3)]
    assert [result() for result in meet(*records, store=store)] == [records] * 3


@pytest.mark.parametrize(
    ("field", "value"),
    [("world_size", 2), ("backend", "nccl"), ("device_type", "cuda"), ("hora", "0"), ("torch", "1"), ("python", "2")],
)
def test_ranks_that_differ_are_told_in_what(field, value):
    results = meet(record(0), record(1, **{field: value}), record(2))
    for result in results[:2]:
        with pytest.raises(CollectiveMismatch, match=rf"{field} is \w+ on rank \d \(node1\) but \w+ on rank \d"):
            result()


def test_every_difference_is_told_at_once():
    with pytest.raises(CollectiveMismatch) as caught:
        check_agreement(record(0), [record(1, torch="9"), record(2, host="node2", hora="8", backend="nccl")])
    for part in ("torch is 2 on rank 0 (node1) but 9 on rank 1 (node1)", "hora is 1", "8 on rank 2 (node2)", "backend is gloo"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"script": "sha256 ab"}, r"script is none on rank 0 \(node1\) but sha256 ab on rank 2 \(node1\)"),
        ({"config": {"lr": "0.2"}}, r"config.lr is 0.1 on rank 0 \(node1\) but 0.2 on rank 2 \(node1\)"),
        ({"config": {"lr": "0.1", "size": "8"}}, r"config.size is absent on rank 0 \(node1\) but 8 on rank 2 \(node1\)"),
        ({"check_calls": False}, r"check_calls is True on rank 0 \(node1\) but False on rank 2 \(node1\)"),
    ],
)
def test_what_differs_in_code_and_configuration_is_named(changes, words):
    first, second = record(0, config={"lr": "0.1"}), record(2, **({"config": {"lr": "0.1"}} | changes))
    with pytest.raises(CollectiveMismatch, match=words):
        check_agreement(first, [first, second])
