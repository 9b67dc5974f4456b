"""Which hosts a job runs on next."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hora.launch.hosts import Host
from hora.launch.roster import Roster, delay_s

HOSTS = (Host("alpha", 2), Host("beta", 2), Host("gamma", 4))
ALL = {"alpha": 2, "beta": 2, "gamma": 4}


def chosen(roster: Roster) -> dict[str, int | None]:
    return {host.name: host.slots for host in roster.choose()}


@pytest.mark.parametrize(
    ("fewest", "most", "hosts"),
    [
        (1, None, ALL),
        (1, 8, ALL),
        (1, 99, ALL),
        (1, 7, {"alpha": 2, "beta": 2, "gamma": 3}),
        (1, 3, {"alpha": 2, "beta": 1}),
        (8, 8, ALL),
        (9, 9, {}),
    ],
)
def test_hosts_are_filled_one_after_the_other_up_to_the_most(fewest: int, most: int | None, hosts: Mapping[str, int]) -> None:
    assert chosen(Roster(HOSTS, fewest, most, None)) == hosts


def test_a_lost_host_is_left_out_until_it_has_answered() -> None:
    roster = Roster(HOSTS, 4, 4, again_after_s=10.0)
    roster.lose("alpha", now=100.0)
    assert chosen(roster) == {"beta": 2, "gamma": 2}
    assert (roster.due(109.9), roster.due(110.0)) == ([], ["alpha"])
    assert chosen(roster) == {"beta": 2, "gamma": 2}
    roster.welcome("alpha")
    assert chosen(roster) == {"alpha": 2, "beta": 2}
    assert roster.due(1e9) == []


def test_a_host_that_is_lost_again_and_again_is_asked_less_and_less_often() -> None:
    roster = Roster(HOSTS, 1, None, again_after_s=10.0)
    for wait_s in (10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0):
        roster.lose("beta", now=0.0)
        assert (roster.due(wait_s - 0.1), roster.due(wait_s)) == ([], ["beta"])
        roster.welcome("beta")


def test_a_delay_has_a_limit_however_often() -> None:
    assert [delay_s(0.5, times) for times in (0, 1, 2, 3, 7, 10**6)] == [0.5, 0.5, 1.0, 2.0, 30.0, 30.0]


def test_a_host_may_be_left_out_for_good() -> None:
    roster = Roster(HOSTS, 1, None, again_after_s=None)
    roster.lose("gamma", now=0.0)
    assert roster.due(1e12) == []
    assert chosen(roster) == {"alpha": 2, "beta": 2}


def test_a_new_host_is_asked_before_it_is_used_unless_there_is_time_to_find_out() -> None:
    roster = Roster(HOSTS[:1], 1, None, 10.0)
    roster.relist(HOSTS[:2], due=5.0)
    assert roster.due(5.0) == ["beta"]
    assert chosen(roster) == {"alpha": 2}
    roster.relist(HOSTS, due=None)
    assert chosen(roster) == {"alpha": 2, "gamma": 4}


def test_a_host_that_is_listed_no_more_is_neither_used_nor_asked() -> None:
    roster = Roster(HOSTS, 1, None, 10.0)
    roster.lose("alpha", now=0.0)
    roster.relist([Host("beta", 1), Host("gamma", 4)], due=0.0)
    assert roster.due(1e9) == []
    assert chosen(roster) == {"beta": 1, "gamma": 4}
    # Nor is forgotten what has happened to it.
    roster.relist(HOSTS, due=0.0)
    assert roster.due(9.9) == []


@pytest.mark.parametrize(
    ("current", "listed", "most", "reason"),
    [
        pytest.param(ALL, HOSTS, None, "", id="all is as it is"),
        pytest.param({"alpha": 2, "gamma": 4}, HOSTS, None, "beta can be used", id="one more"),
        pytest.param({"gamma": 4}, HOSTS, None, "alpha and beta can be used", id="two more"),
        pytest.param({"alpha": 2, "gamma": 4}, HOSTS, 6, "", id="one more, but there are enough ranks"),
        pytest.param({"beta": 2, "gamma": 4}, HOSTS, 6, "", id="others would do as well"),
        pytest.param({"beta": 2, "gamma": 3}, HOSTS, None, "alpha and gamma can be used", id="one more, and more of another"),
        pytest.param(ALL, HOSTS[:2], None, "gamma is listed no more, or with fewer slots", id="one less"),
        pytest.param(ALL, HOSTS[:1], None, "", id="too few would be left"),
        pytest.param(ALL, (*HOSTS[:2], Host("gamma", 3)), None, "gamma is listed no more, or with fewer slots", id="fewer slots"),
        pytest.param({"delta": 2, "gamma": 4}, HOSTS, 6, "delta is listed no more, or with fewer slots", id="another in its place"),
    ],
)
def test_a_job_goes_on_on_other_hosts_with_a_reason(
    current: Mapping[str, int], listed: tuple[Host, ...], most: int | None, reason: str
) -> None:
    roster = Roster(listed, 4, most, 10.0)
    assert roster.reason(current) == reason


@given(
    story=st.lists(st.tuples(st.sampled_from(["lose", "welcome", "list"]), st.lists(st.sampled_from("abcde"), unique=True)), max_size=12),
    fewest=st.integers(1, 4),
    more=st.integers(0, 4),
)
def test_a_choice_keeps_to_what_is_known(story: list[tuple[str, list[str]]], fewest: int, more: int) -> None:
    """With all hosts of two slots: never more ranks than there may be, nor fewer than must be, never on a host that is lost or not listed."""
    roster, listed, lost = Roster([Host(name, 2) for name in "abc"], fewest, fewest + more, 1.0), set("abc"), set[str]()
    for word, names in story:
        if word == "list":
            roster.relist([Host(name, 2) for name in names], due=None)
            listed = set(names)
        for name in names if word != "list" else ():
            (roster.lose(name, 0.0) if word == "lose" else roster.welcome(name))
            (lost.add if word == "lose" else lost.discard)(name)
    hosts = chosen(roster)
    assert hosts.keys() <= listed - lost
    assert sum(count or 0 for count in hosts.values()) == (
        0 if 2 * len(listed - lost) < fewest else min(2 * len(listed - lost), fewest + more)
    )
    assert roster.reason({name: count or 0 for name, count in hosts.items()}) == ""
