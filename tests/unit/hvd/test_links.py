"""Links over Unix sockets, on a pair of them."""

import os
import select
import socket
from collections.abc import Iterator

import pytest

from hora.errors import PeerLost
from hora.hvd.engine.alarm import Alarm
from hora.hvd.engine.links import NoLinks
from hora.hvd.engine.unix_links import UnixLinks


@pytest.fixture
def ends() -> Iterator[tuple[UnixLinks, UnixLinks]]:
    first, second = socket.socketpair()
    links = UnixLinks({1: first}), UnixLinks({0: second})
    yield links
    for each in links:
        each.close()


def receive(links: UnixLinks) -> list:
    (descriptor,) = links.sockets()
    assert select.select([descriptor], [], [], 5.0)[0]
    return [arrival.content for arrival in links.take(descriptor)]


def test_messages_arrive_whole_and_in_order(ends) -> None:
    first, second = ends
    sent = [b"", b"x", b"y" * 300]
    for message in sent:
        first.send(1, message)
    assert receive(second) == sent


def test_who_sends_much_to_a_peer_that_is_busy_does_not_wait(ends) -> None:
    first, second = ends
    large = os.urandom(5_000_000)
    first.send(1, large)
    first.send(1, b"after")
    assert first.unsent()
    found: list = []
    while len(found) < 2:
        first.flush()
        found += receive(second)
    assert found == [large, b"after"]
    assert not first.unsent()


def test_a_peer_that_is_gone_is_told_of_and_sending_to_it_does_nothing(ends) -> None:
    first, second = ends
    second.close()
    (error,) = receive(first)
    assert isinstance(error, PeerLost)
    first.send(1, b"x")
    assert first.sockets() == ()


def test_a_length_that_cannot_be_is_refused(ends) -> None:
    first, second = ends
    first._connections[1].send(b"\xff" * 8)
    with pytest.raises(PeerLost, match="cannot have"):
        receive(second)


def test_a_forked_process_does_not_keep_the_connection(ends) -> None:
    first, second = ends
    waiting, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(waiting, 1)
        os._exit(0)
    try:
        first.close()
        assert isinstance(receive(second)[0], PeerLost)
    finally:
        os.write(told, b"x")
        os.waitpid(child, 0)
        os.close(waiting)
        os.close(told)


def test_an_alarm_rings_once_for_each_time_it_is_set() -> None:
    alarm = Alarm(NoLinks())
    try:
        alarm.ring()
        assert alarm.wait(0.0) == []
        alarm.set()
        alarm.ring()
        alarm.ring()
        assert alarm.wait(None) == []  # would sleep for ever
        assert not select.select([alarm._ear], [], [], 0.0)[0]
    finally:
        alarm.close()


def test_an_engine_that_waits_for_years_can_be_woken() -> None:
    alarm = Alarm(NoLinks())
    alarm.set()
    alarm.ring()
    assert alarm.wait(1e9) == []
    alarm.close()
