import pytest

from hora.rendezvous.table import MISSING, OK, REFUSED, Answer, Table, Waiter

NEVER = b"1000"


class Desk:
    """A table with a hand-moved clock, and what waiters were told."""

    def __init__(self, max_answer_bytes: int = 4096) -> None:
        self.now = 0.0
        self.told: list[tuple[Waiter, Answer | None]] = []
        self.table = Table(max_answer_bytes=max_answer_bytes, notify=lambda waiter: self.told.append((waiter, waiter.answer)))

    def ask(self, *request: bytes) -> Answer | Waiter:
        return self.table.apply(request, self.now)

    def waiter(self, *request: bytes) -> Waiter:
        waiter = self.ask(*request)
        assert isinstance(waiter, Waiter)
        return waiter


def test_get_of_a_present_key_is_answered_at_once() -> None:
    desk = Desk()
    desk.ask(b"set", b"k", b"v")
    assert desk.ask(b"get", NEVER, b"k") == [OK, b"v"]
    assert desk.told == []


def test_waiter_is_told_when_the_last_key_comes() -> None:
    desk = Desk()
    waiter = desk.waiter(b"get", NEVER, b"a", b"b")
    desk.ask(b"set", b"b", b"2")
    assert desk.told == []
    desk.ask(b"set", b"a", b"1")
    assert desk.told == [(waiter, [OK, b"1", b"2"])]
    assert desk.table.next_deadline() is None


@pytest.mark.parametrize(
    "request_", [(b"add", b"k", b"1"), (b"append", b"k", b"x"), (b"compare_set", b"k", b"", b"x"), (b"multi_set", b"j", b"y", b"k", b"x")]
)
def test_every_way_to_set_a_key_wakes_those_who_wait_for_it(request_: tuple[bytes, ...]) -> None:
    desk = Desk()
    waiter = desk.waiter(b"wait", NEVER, b"k")
    desk.ask(*request_)
    assert desk.told == [(waiter, [OK])]


def test_key_deleted_while_others_are_missing_is_waited_for_again() -> None:
    desk = Desk()
    waiter = desk.waiter(b"get", NEVER, b"a", b"b")
    desk.ask(b"set", b"a", b"1")
    desk.ask(b"delete", b"a")
    desk.ask(b"set", b"b", b"2")
    assert desk.told == []
    desk.ask(b"set", b"a", b"3")
    assert desk.told == [(waiter, [OK, b"3", b"2"])]


def test_expired_waiter_is_told_what_is_missing_and_nothing_else() -> None:
    desk = Desk()
    early, late = desk.waiter(b"wait", b"5", b"a", b"b", b"b"), desk.waiter(b"wait", b"6", b"c")
    desk.ask(b"set", b"a", b"1")
    assert desk.table.next_deadline() == 5.0
    desk.table.expire(4.9)
    assert desk.told == []
    desk.table.expire(5.0)
    assert desk.told == [(early, [MISSING, b"b"])]
    assert desk.table.next_deadline() == 6.0
    desk.ask(b"set", b"b", b"1")
    desk.ask(b"set", b"c", b"1")
    assert [waiter for waiter, _ in desk.told] == [early, late]


def test_forgotten_waiter_is_told_nothing() -> None:
    desk = Desk()
    gone, stays = desk.waiter(b"wait", b"5", b"k", b"j"), desk.waiter(b"wait", b"9", b"k")
    desk.table.forget(gone)
    assert desk.table.next_deadline() == 9.0
    desk.ask(b"set", b"k", b"v")
    desk.ask(b"set", b"j", b"v")
    assert [waiter for waiter, _ in desk.told] == [stays]


def test_answer_carries_as_many_values_as_fit_and_at_least_one() -> None:
    desk = Desk(max_answer_bytes=100)
    for key in (b"a", b"b", b"c"):
        desk.ask(b"set", key, bytes(40))
    assert desk.ask(b"get", NEVER, b"a", b"b", b"c") == [OK, bytes(40), bytes(40)]
    assert desk.ask(b"set", b"d", bytes(90)) == [OK]
    assert desk.ask(b"get", NEVER, b"d", b"a") == [OK, bytes(90)]


@pytest.mark.parametrize(
    "request_", [(b"set", b"k", bytes(91)), (b"append", b"k", bytes(51)), (b"compare_set", b"k", bytes(40), bytes(91))]
)
def test_value_that_no_answer_could_carry_is_refused_and_changes_nothing(request_: tuple[bytes, ...]) -> None:
    desk = Desk(max_answer_bytes=100)
    desk.ask(b"set", b"k", bytes(40))
    refused = desk.ask(*request_)
    assert isinstance(refused, list)
    assert refused[0] == REFUSED
    assert b"the value of 'k' must fit into one message, but has 91 bytes" in refused[1]
    assert desk.ask(b"get", NEVER, b"k") == [OK, bytes(40)]


def test_keys_are_listed_in_pages() -> None:
    desk = Desk(max_answer_bytes=30)
    for name in (b"p/3", b"p/1", b"q/9", b"p/2"):
        desk.ask(b"set", name, b"")
    assert desk.ask(b"keys", b"p/", b"") == [OK, b"p/1", b"p/2", b"p/3"]
    assert desk.ask(b"keys", b"", b"p/2") == [OK, b"p/3", b"q/9"]
    assert desk.ask(b"keys", b"", b"q/9") == [OK]
    assert desk.ask(b"num_keys") == [OK, b"4"]


def test_adding_to_text_is_refused() -> None:
    desk = Desk()
    desk.ask(b"set", b"k", b"text")
    assert desk.ask(b"add", b"k", b"1") == [REFUSED, b"'k' must hold a whole number, but holds something else"]


@pytest.mark.parametrize("timeout_s", [b"nan", b"inf", b"-inf"])
def test_endless_waiting_is_refused(timeout_s: bytes) -> None:
    desk = Desk()
    refused = desk.ask(b"wait", timeout_s, b"k")
    assert isinstance(refused, list)
    assert refused[0] == REFUSED
    assert desk.table.next_deadline() is None


@pytest.mark.parametrize(
    "request_",
    [(), (b"eval", b"1"), (b"set", b"k"), (b"get",), (b"get", b"soon", b"k"), (b"multi_set", b"k"), (b"num_keys", b"k"), (b"__init__",)],
)
def test_requests_without_a_meaning_are_refused(request_: tuple[bytes, ...]) -> None:
    refused = Desk().ask(*request_)
    assert isinstance(refused, list)
    assert refused[0] == REFUSED
    assert refused[1].startswith(b"no such request")
