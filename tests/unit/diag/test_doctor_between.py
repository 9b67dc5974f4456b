"""What `hora doctor` makes of what several hosts have told."""

import pytest

from hora.diag.doctor import between, report
from hora.diag.doctor.between import Clock, Transfer
from hora.diag.doctor.finding import Finding


def test_hosts_that_differ_are_named_with_what_they_have() -> None:
    assert between.same("torch", {"a": "2.10", "b": "2.10"}, "install").found == "2.10 everywhere"
    finding = between.same("torch", {"a": "2.10", "b": "2.13", "c": "2.10"}, "install")
    assert (finding.grade, finding.found, finding.remedy) == ("wrong", "2.10 on a, c; 2.13 on b", "install")


@pytest.mark.parametrize(
    ("ahead_s", "doubt_s", "grade", "found"),
    [
        (0.2, 0.01, "ok", "at most 0.22 s apart"),
        (-3.0, 0.01, "warning", "a is 3.0 s ahead of b"),
        (3.0, 1.5, "ok", "at most 6.00 s apart"),  # told through a slow line: nothing can be said
    ],
)
def test_clocks_are_compared_as_far_as_they_can_be(ahead_s: float, doubt_s: float, grade: str, found: str) -> None:
    finding = between.clocks({"a": Clock(0.0, doubt_s), "b": Clock(ahead_s, doubt_s)})
    assert (finding.grade, finding.found) == (grade, found)


def test_names_must_lead_to_the_others() -> None:
    well = {"a": {"a": ["127.0.1.1"], "b": ["10.0.0.2"]}, "b": {"a": ["10.0.0.1", "127.0.1.1"], "b": ["10.0.0.2"]}}
    assert between.names(well).grade == "ok"
    trapped = between.names({"a": {"a": ["10.0.0.1"], "b": ["127.0.1.1"]}, "b": {"a": [], "b": ["::1"]}})
    assert trapped.grade == "warning"
    assert trapped.found == "on a b is 127.0.1.1, which leads back to a; b does not know a"


def test_a_way_that_is_closed_is_named_with_its_ends() -> None:
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2"}
    assert between.reach({"a": {"b": None}, "b": {"a": None}}, addresses).grade == "ok"
    closed = between.reach({"a": {"b": None}, "b": {"a": "timed out"}}, addresses)
    assert (closed.grade, closed.found) == ("wrong", "b does not reach a at 10.0.0.1: timed out")


@pytest.mark.parametrize(
    ("rates", "grade", "found"),
    [
        ([1.2e9, 1.1e9, 1.15e9], "ok", "1,150 MB/s (9.2 Gbit/s) from one host to another; the least from b to c 1,100 MB/s (8.8 Gbit/s)"),
        ([1.2e9, 0.1e9, 1.2e9], "warning", "1,200 MB/s (9.6 Gbit/s) from one host to another, but from b to c 100 MB/s (0.8 Gbit/s)"),
        ([11e6, 11e6, 11e6], "warning", "11 MB/s (0.088 Gbit/s) from one host to another"),
    ],
)
def test_a_slow_network_and_a_slow_host_are_told_apart(rates: list[float], grade: str, found: str) -> None:
    finding = between.speeds([Transfer(*pair, rate) for pair, rate in zip(("ab", "bc", "ca"), rates, strict=True)])
    assert (finding.grade, finding.found) == (grade, found)


def test_a_directory_is_shared_if_all_read_what_all_wrote() -> None:
    left = {"a": "1", "b": "2"}
    assert between.marks("/data", left, {"a": left, "b": left}).grade == "ok"
    apart = between.marks("/data", left, {"a": {"a": "1", "b": ""}, "b": left})
    assert (apart.grade, apart.found) == ("wrong", "/data: a does not see what b wrote")


def test_findings_stand_below_their_hosts() -> None:
    findings = [Finding("cores", "ok", "2", host="a"), Finding("clocks", "ok", "0 s"), Finding("cores", "ok", "4", host="b")]
    assert report.as_lines(findings) == [
        "a", "ok       cores   2", "b", "ok       cores   4", "between the hosts", "ok       clocks  0 s",
    ]  # fmt: skip
