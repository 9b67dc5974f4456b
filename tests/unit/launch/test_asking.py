"""What the answers of hosts come to: addresses, and who runs how many ranks."""

from collections.abc import Mapping
from typing import Any

import pytest

from hora.errors import ConfigError
from hora.launch import asking, interfaces, ports
from hora.launch.hosts import read_hosts
from hora.launch.options import LaunchOptions


class Hosts:
    """In place of `Remotes`: what each node answers, and what it was asked."""

    def __init__(self, answers: Mapping[int, Mapping[str, Any]]) -> None:
        plain = {"cores": 4, "gpus": 0, "address": "10.0.0.9", "seen_from": None, "script_port": 7}
        self.answers = {node: plain | answer for node, answer in answers.items()}
        self.asked: Mapping[int, Mapping[str, Any]] = {}
        self.dismissed: list[int] = []

    @property
    def nodes(self) -> list[int]:
        return sorted(self.answers)

    def ask(self, messages: Mapping[int, Mapping[str, Any]], timeout_s: float) -> dict[int, dict[str, Any]]:
        assert timeout_s <= 60.0
        self.asked = messages
        return {node: dict(answer) for node, answer in self.answers.items()}

    def dismiss(self, node: int) -> None:
        self.dismissed.append(node)


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is 10.0.0.1 on the way to "b", 10.0.0.7 as somebody sees it, and fe80::1 on the way to "link"."""
    monkeypatch.setattr(interfaces, "route_to", {"b": "10.0.0.1", "mad": "127.0.1.1", "link": "fe80::1%eth0"}.get)
    monkeypatch.setattr(ports, "is_this_machine", {"10.0.0.7", "fe80::1%eth0"}.__contains__)


def ask(names: str, here: int | None, answers: Mapping[int, Mapping[str, Any]], **options: Any) -> tuple[asking.Answers, Hosts]:
    hosts = Hosts(answers)
    return asking.ask_hosts(LaunchOptions("train.py", hosts=read_hosts(names), **options), hosts, here), hosts  # type: ignore[arg-type]


def test_this_machine_is_reached_on_the_way_to_the_first_host_that_leads_anywhere() -> None:
    answers, hosts = ask("here:2,mad:1,b:2", 0, {1: {}, 2: {}})
    assert answers == asking.Answers((2, 1, 2), 0, "10.0.0.1", "10.0.0.1", None)
    assert [hosts.asked[node]["towards"] for node in (1, 2)] == ["10.0.0.1"] * 2
    assert [hosts.asked[node]["first"] for node in (1, 2)] == [False, False]


def test_rank_zero_elsewhere_says_its_own_address_and_port() -> None:
    answers, hosts = ask("b:1,here:1", 1, {0: {}})
    assert (answers.here, answers.address, answers.master_addr, answers.script_port) == (1, "10.0.0.1", "10.0.0.9", 7)
    assert hosts.asked[0]["first"] is True


def test_names_that_ssh_alone_knows_are_reached_where_ssh_was_seen() -> None:
    answers, _ = ask("alias:1", None, {0: {"seen_from": "10.0.0.7"}})
    assert (answers.here, answers.address, answers.master_addr) == (None, "10.0.0.7", "10.0.0.9")


@pytest.mark.parametrize(("name", "seen"), [("alias", None), ("alias", "192.0.2.1"), ("mad", None), ("link", "fe80::1%eth0")])
def test_hosts_without_a_shared_network_are_answered(name: str, seen: str | None) -> None:
    with pytest.raises(ConfigError, match="--interface"):
        ask(name, None, {0: {"seen_from": seen}})


def test_rank_zero_without_an_address_is_answered() -> None:
    with pytest.raises(ConfigError, match="b does not know its own address"):
        ask("b", None, {0: {"address": None}})


def test_hosts_that_get_no_ranks_are_dismissed() -> None:
    answers, hosts = ask("b,c,d", None, {0: {"gpus": 4}, 1: {"gpus": 2}, 2: {"gpus": 8}}, nproc_per_node="auto", nproc=5)
    assert (answers.counts, hosts.dismissed) == ((4, 1), [2])


def test_the_working_directory_has_the_name_that_the_user_knows(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "link")
    for named, expected in ((tmp_path / "link", tmp_path / "link"), (tmp_path, tmp_path / "real"), ("gone", tmp_path / "real")):
        monkeypatch.setenv("PWD", str(named))
        assert asking.working_directory() == str(expected)
