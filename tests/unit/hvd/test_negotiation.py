"""The negotiation without ranks: who says what in which order, and what is decided."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hora.errors import CollectiveError
from hora.hvd.negotiation.coordinator import Coordinator, Tuning
from hora.hvd.negotiation.fusion import plan_fusion
from hora.hvd.negotiation.message import Announcement, Batch, Decision
from hora.hvd.negotiation.mismatch import find_mismatch
from hora.hvd.negotiation.request import Kind, Part, Reduction, Request
from hora.hvd.negotiation.stalls import say_end, say_warning
from hora.hvd.negotiation.table import Ready
from hora.hvd.negotiation.vocabulary import Phrasebook


def reduce(name: str, *shape: int, set_id: int = 0, dtype: str = "float32", **more: object) -> Request:
    return Request(Kind.ALLREDUCE, name, set_id, (Part(dtype, shape),), **more)


class Rank:
    """What a rank does with the negotiation, through messages as they travel."""

    def __init__(self, number: int, coordinator: Coordinator) -> None:
        self.number, self.coordinator = number, coordinator
        self.book, self.heard = Phrasebook(), 0
        self.pending: dict = {}
        self.done: list = []
        self.said_numbers = 0

    def give(self, *requests: Request, now: float = 0.0, leaving: str | None = None) -> None:
        said = Announcement(heard=self.heard, leaving=leaving)
        for request in requests:
            self.pending[request.key] = request
            number = self.book.number_of(request)
            (said.requests if number is None else said.numbers).append(request if number is None else number)
        self.said_numbers += len(said.numbers)
        self.coordinator.hear(self.number, Announcement.from_bytes(said.to_bytes()), now)

    def wait(self, name: str, *, gives_up: bool = False) -> None:
        said = Announcement(heard=self.heard, waits=[((0, name), gives_up)])
        self.coordinator.hear(self.number, Announcement.from_bytes(said.to_bytes()), 0.0)

    def obey(self, decision: Decision) -> None:
        assert Decision.from_bytes(decision.to_bytes()) == decision
        self.heard = decision.serial
        for number, key in decision.learn:
            self.book.learn(number, self.pending[key])
        for batch in decision.batches:
            keys = [self.book.key_of(entry) if isinstance(entry, int) else entry for entry in batch.entries]
            self.done += [(key, batch.error) for key in keys]
            for key in keys:
                self.pending.pop(key, None)
        self.book.forget(decision.forget)


def world(size: int, **tuning: object) -> tuple[Coordinator, list[Rank]]:
    coordinator = Coordinator(size, Tuning(**tuning))
    return coordinator, [Rank(number, coordinator) for number in range(size)]


def decide(coordinator: Coordinator, ranks: list[Rank]) -> dict[int, Decision]:
    decisions = coordinator.decide()[1]
    for number, decision in decisions.items():
        ranks[number].obey(decision)
    return decisions


def test_an_operation_begins_when_the_last_rank_is_ready() -> None:
    coordinator, ranks = world(3)
    for rank in ranks[:2]:
        rank.give(reduce("x", 4))
        assert decide(coordinator, ranks) == {}
    ranks[2].give(reduce("x", 4))
    decide(coordinator, ranks)
    assert all(rank.done == [((0, "x"), None)] for rank in ranks)
    assert coordinator.table.is_empty


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ranks_that_submit_in_any_order_do_the_same_in_one_order(data: st.DataObject) -> None:
    """Any number of rounds, order and interleaving, any capacity of the cache: everything is done, everywhere in one order, and once."""
    size = data.draw(st.integers(1, 4))
    capacity = data.draw(st.integers(0, 3))
    coordinator, ranks = world(size, cache_capacity=capacity, fusion_bytes=data.draw(st.sampled_from([1, 40, 1000])))
    for _ in range(data.draw(st.integers(1, 5))):
        names = data.draw(st.lists(st.sampled_from("abcde"), unique=True, min_size=1))
        length = data.draw(st.integers(1, 3))
        orders = [data.draw(st.permutations(names)) for _ in ranks]
        steps = data.draw(st.permutations([number for number in range(size) for _ in names]))
        for number in steps:
            ranks[number].give(reduce(orders[number].pop(0), length))
            if data.draw(st.booleans()):
                decide(coordinator, ranks)
        decide(coordinator, ranks)
        assert {key for key, _ in ranks[0].done} == {(0, name) for name in names}
        assert all(rank.done == ranks[0].done and len(rank.done) == len(names) and not rank.pending for rank in ranks)
        for rank in ranks:
            rank.done.clear()
    assert coordinator.numbered <= capacity


def test_names_that_come_again_are_told_in_numbers_from_the_third_time_on() -> None:
    coordinator, ranks = world(2)
    for _ in range(4):
        for rank in ranks:
            rank.give(reduce("x", 4), reduce("y", 2))
        decide(coordinator, ranks)
    assert [rank.said_numbers for rank in ranks] == [4, 4]
    assert len(Announcement(numbers=[1, 2], heard=9).to_bytes()) < 30


def test_a_name_with_another_shape_is_told_in_full_and_compared() -> None:
    coordinator, ranks = world(2)
    for _ in range(2):
        for rank in ranks:
            rank.give(reduce("x", 4))
        decide(coordinator, ranks)
    ranks[0].give(reduce("x", 4))
    ranks[1].give(reduce("x", 5))
    assert ranks[0].said_numbers == 1
    decide(coordinator, ranks)
    assert "[4] on rank 0, [5] on rank 1" in ranks[0].done[-1][1]
    for rank in ranks:
        rank.give(reduce("x", 5))
    decide(coordinator, ranks)
    assert ranks[1].done[-1] == ((0, "x"), None)


def test_a_number_is_understood_until_every_rank_has_heard_that_it_is_taken_back() -> None:
    coordinator, ranks = world(2, cache_capacity=1)

    def together(name: str) -> dict[int, Decision]:
        for rank in ranks:
            rank.give(reduce(name, 1))
        return decide(coordinator, ranks)

    together("a")
    together("a")
    for rank in ranks:
        rank.give(reduce("b", 1))
    decide(coordinator, ranks)
    for rank in ranks:
        rank.give(reduce("b", 1))
    late = coordinator.decide()[1]
    assert late[1].forget == [1]
    ranks[1].give(reduce("a", 1))  # in its number, for it has not read what it is to forget
    assert ranks[1].said_numbers == 1
    for number, decision in late.items():
        ranks[number].obey(decision)
    ranks[0].give(reduce("a", 1))
    decide(coordinator, ranks)
    assert all(rank.done[-1] == ((0, "a"), None) for rank in ranks)


def test_process_sets_concern_their_ranks_alone_and_may_be_announced_before_they_are_known() -> None:
    coordinator, ranks = world(3)
    for rank in ranks[1:]:
        rank.give(reduce("x", 1, set_id=7))
    assert decide(coordinator, ranks) == {}
    coordinator.table.register(7, (1, 2))
    assert sorted(decide(coordinator, ranks)) == [1, 2]
    ranks[0].give(reduce("x", 1))
    coordinator.table.unregister(7)
    assert [key for key, _, _ in coordinator.table.waiting()] == [(0, "x")]


def test_a_rank_is_released_that_waits_for_one_that_waits_for_it() -> None:
    """Rank 0 has all gradients and rank 1 lacks some, which it will give when it has averaged its loss with rank 0; rank 2 still computes."""
    coordinator, ranks = world(3)
    for step in range(2):
        ranks[0].give(reduce("gradients", 4))
        ranks[0].wait("gradients", gives_up=True)
        ranks[1].give(reduce("loss", 1))
        assert decide(coordinator, ranks) == {}, f"of step {step}: rank 1 may go on, as far as anybody knows"
        ranks[1].wait("loss")
        (released,) = decide(coordinator, ranks).items()
        assert released == (0, Decision(released[1].serial, release=[(0, "gradients")]))
        assert decide(coordinator, ranks) == {}, "once"
        for rank in ranks:
            rank.give(*[reduce(name, length) for name, length in (("loss", 1), ("gradients", 4)) if (0, name) not in rank.pending])
        decide(coordinator, ranks)
        assert [sorted(rank.done) for rank in ranks] == [[((0, "gradients"), None), ((0, "loss"), None)]] * 3
        for rank in ranks:
            rank.done.clear()


def test_ranks_that_wait_in_backwards_of_two_optimizers_are_released() -> None:
    coordinator, ranks = world(2)
    for rank, mine in zip(ranks, "ab", strict=True):
        rank.give(reduce(mine, 4))
        rank.wait(mine, gives_up=True)
    decisions = decide(coordinator, ranks)
    assert [decisions[number].release for number in range(2)] == [[(0, "a")], [(0, "b")]]


def test_a_rank_is_not_released_while_what_it_waits_for_may_come() -> None:
    coordinator, ranks = world(3)
    ranks[0].give(reduce("gradients", 4), reduce("loss", 1))
    ranks[0].wait("gradients", gives_up=True)
    ranks[1].give(reduce("loss", 1))
    ranks[1].wait("loss")  # which rank 2 lacks alone
    assert decide(coordinator, ranks) == {}
    ranks[2].give(reduce("loss", 1), reduce("gradients", 4), reduce("more", 1))
    ranks[2].wait("more")  # which rank 0 lacks, but rank 2 has given its gradients
    decide(coordinator, ranks)
    ranks[1].give(reduce("gradients", 4), reduce("more", 1))
    assert all(not decision.release for decision in decide(coordinator, ranks).values())


def test_a_rank_that_has_joined_takes_part_with_zeros_in_sums_alone() -> None:
    coordinator, ranks = world(2)
    join = Request(Kind.JOIN, "join")
    ranks[0].give(join)
    ranks[1].give(reduce("x", 3))
    batch = decide(coordinator, ranks)[0].batches[0]
    assert batch.full == (reduce("x", 3),)
    ranks[1].give(Request(Kind.ALLGATHER, "g", 0, (Part("int64", (1,)),)))
    decide(coordinator, ranks)
    assert "Allgather is not supported with Join at this time." in ranks[1].done[-1][1]
    ranks[1].give(join)
    assert decide(coordinator, ranks)[0].batches[0].last_joined == 1
    ranks[1].give(reduce("y", 3))
    assert decide(coordinator, ranks) == {}


def test_what_waits_for_a_rank_that_joins_begins_when_it_does() -> None:
    coordinator, ranks = world(2)
    ranks[1].give(reduce("x", 3))
    assert decide(coordinator, ranks) == {}
    ranks[0].give(Request(Kind.JOIN, "join"))
    assert decide(coordinator, ranks)[1].batches[0].entries == ((0, "x"),)


PART = (Part("float32", (4,)),)
MISMATCHES = [
    (reduce("t", 4), reduce("t", 3), "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [4], but another rank sent a tensor "
     "of shape [3]. Tensor 't', shape: [4] on ranks 0 and 1, [3] on rank 2."),
    (reduce("t", 4), reduce("t", 4, dtype="float64"), "Mismatched data types: One rank had type float32, but another rank had type float64. "),
    (reduce("t", 4), reduce("t", 4, op=Reduction.MIN),
     "Mismatched reduction operation: One rank sent reduction op 1, but another rank sent reduction op 3. "),
    (reduce("t", 4), reduce("t", 4, prescale=2.0), "Mismatched prescale and/or postscale factors: "),
    (Request(Kind.BROADCAST, "t", 0, PART), Request(Kind.BROADCAST, "t", 0, PART, root=1),
     "Mismatched BROADCAST root ranks: One rank specified root rank 0, but another rank specified root rank 1. "),
    (reduce("t", 4), Request(Kind.ALLGATHER, "t", 0, PART), "Mismatched operations: One rank did an ALLREDUCE, but another rank did an ALLGATHER. "),
    (reduce("t", 4), reduce("t", 4, device="cuda"), "Mismatched ALLREDUCE CPU/GPU device selection: "),
    (Request(Kind.ALLGATHER, "t", 0, (Part("int8", (4, 2)),)), Request(Kind.ALLGATHER, "t", 0, (Part("int8", (9, 3)),)),
     "Mismatched ALLGATHER tensor shapes: One rank sent a tensor with dimension 1 equal to 2, but another rank sent a tensor with "
     "dimension 1 equal to 3. "),
    (reduce("t", 4), Request(Kind.ALLREDUCE, "t", 0, PART * 2), "Mismatched groups: One rank sent 1 tensors, but another rank sent 2 "),
    (reduce("t", 4, labels=("a",)), reduce("t", 4, labels=("b",)), "Mismatched groups: ranks sent different tensors "),
]  # fmt: skip


@pytest.mark.parametrize(("common", "other", "text"), MISMATCHES, ids=[text[:34] for _, _, text in MISMATCHES])
def test_what_differs_is_said_in_horovods_words_with_tensor_and_ranks(common: Request, other: Request, text: str) -> None:
    found = find_mismatch({0: common, 1: common, 2: other})
    assert found is not None
    assert found.startswith(text)
    assert "on ranks 0 and 1" in found
    assert "on rank 2" in found


@pytest.mark.parametrize("kind", [Kind.ALLGATHER, Kind.ALLTOALL])
def test_rows_may_differ_where_they_are_put_behind_one_another(kind: Kind) -> None:
    assert find_mismatch({0: Request(kind, "t", 0, (Part("int8", (1, 2)),)), 1: Request(kind, "t", 0, (Part("int8", (5, 2)),))}) is None


def ready(*requests: Request) -> list[Ready]:
    return [Ready({0: request}) for request in requests]


def test_fusion_fills_batches_and_looks_past_what_cannot_go_in() -> None:
    gather = Request(Kind.ALLGATHER, "g", 0, PART)
    some = ready(
        reduce("a", 4), gather, reduce("b", 4), reduce("m", 4, op=Reduction.MAX), reduce("c", 4), reduce("big", 400), reduce("d", 1)
    )
    found = [[one.request.name for one in batch] for batch in plan_fusion(some, 40)]
    assert found == [["a", "b"], ["g"], ["m"], ["c"], ["big"], ["d"]]


def test_errors_and_adasum_travel_alone() -> None:
    some = [*ready(reduce("a", 4)), Ready({0: reduce("b", 4)}, error="wrong"), *ready(reduce("c", 4, op=Reduction.ADASUM), reduce("d", 4))]
    assert [[one.request.name for one in batch] for batch in plan_fusion(some, 1000)] == [["a", "d"], ["b"], ["c"]]


def test_ranks_that_are_missing_are_named_once_and_then_all_ends() -> None:
    coordinator, ranks = world(3, stall_warn_s=5.0, stall_end_s=20.0)
    ranks[0].give(reduce("x", 1), now=1.0)
    ranks[2].give(reduce("x", 1), reduce("y", 1), now=2.0)
    assert coordinator.stalled(5.9) == []
    text = say_warning(coordinator.stalled(7.5), 5.0)
    assert "for more than 5 seconds" in text
    assert "Missing ranks:\n0: [y]\n1: [x, y]\n" in text
    assert "Waiting: ranks 0 and 2" in text
    assert coordinator.stalled(8.0) == []
    assert coordinator.overdue(20.0) == []
    ranks[1].give(reduce("z", 1), now=18.0)  # too late to count
    coordinator.end(say_end(coordinator.overdue(21.5), 20.0))
    decisions = coordinator.decide()[1]
    assert sorted(decisions) == [0, 1, 2]
    assert "Missing ranks:\n0: [y]\n1: [x, y]\n" in decisions[1].end
    assert coordinator.decide() == ([], {})


def test_a_rank_that_leaves_ends_all_after_what_was_ready() -> None:
    coordinator, ranks = world(2)
    ranks[0].give(reduce("x", 1))
    ranks[1].give(reduce("x", 1), leaving="rank 1 left")
    decision = decide(coordinator, ranks)[0]
    assert decision.batches
    assert decision.end == "rank 1 left"


@pytest.mark.parametrize("data", [b"", b"[]", b"nonsense", b'[[["ALLREDUCE"]],[],0,null]', b'[[],["x"],0,null]'])
def test_a_message_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(CollectiveError, match="cannot be read"):
        Announcement.from_bytes(data)
    with pytest.raises(CollectiveError, match="cannot be read"):
        Decision.from_bytes(data)


def test_messages_say_everything() -> None:
    request = Request(Kind.ALLTOALL, "é", 3, (Part("bool", (0, 2)), Part("int8", ())), "cuda", 4, 0.1, 1e300, 2, (1, 0), ("a", "b"))
    said = Announcement([request], [1, 5], 8, "why", [((3, "é"), True)])
    assert Announcement.from_bytes(said.to_bytes()) == said
    decision = Decision(2, [Batch((1, (0, "x")), "no", True, (request,), 3)], [(4, (0, "x"))], [9], "end", [(0, "y")])
    assert Decision.from_bytes(decision.to_bytes()) == decision
