"""What names hosts: words, files, and how many ranks each gets."""

import re
from pathlib import Path

import pytest

from hora.errors import ConfigError
from hora.launch.dealing import deal_ranks, find_here
from hora.launch.hosts import Host, deal, read_hostfile, read_hosts
from hora.launch.options import LaunchOptions


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [Host("a")]),
        ("a:2,b:3", [Host("a", 2), Host("b", 3)]),
        ("a,b,a:2", [Host("a", 3), Host("b")]),
        ("10.0.0.1:1,node-1.example.com", [Host("10.0.0.1", 1), Host("node-1.example.com")]),
        ("me@a:2", [Host("me@a", 2)]),
        ("[fd00::1]:4,[2001:db8::2]", [Host("fd00::1", 4), Host("2001:db8::2")]),
        ("[fe80::1%eth0]:4", [Host("fe80::1%eth0", 4)]),
        ("me@[::1]:2", [Host("me@::1", 2)]),
    ],
)
def test_words_name_hosts(text: str, hosts: list[Host]) -> None:
    assert list(read_hosts(text)) == hosts


def test_the_user_is_no_part_of_the_address() -> None:
    assert Host("me@a").address == "a"
    assert Host("a").address == "a"


HOSTILE = [
    "-oProxyCommand=touch x",
    "-oProxyCommand=x",
    "-l@a",
    "a b",
    "a;touch x",
    "$(x)",
    "a`x`",
    "a\nb",
    "a|b",
    "a&b",
    "a'",
    "a\\b",
    "../a",
    "@a",
    "é",
]


@pytest.mark.parametrize("name", [*HOSTILE, "", "me@"])
def test_hostile_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a host must"):
        read_hosts(name)
    with pytest.raises(ConfigError, match="a host must"):
        read_hosts(f"{name}:2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:0", "slots must be a number from 1 to 4096, but 'a:0' has '0'"),
        ("a:4097", "slots must be a number from 1 to 4096, but 'a:4097' has '4097'"),
        ("a:x", "has 'x'"),
        ("a:²", "has '²'"),
        ("fd00::1:4", "must stand in brackets"),
        ("[a]:4", "there must be an IPv6 address, but '[a]:4' has 'a'"),
        ("[::1%;x]:4", "there must be an IPv6 address"),
        ("[fe80::1]:4", "write [fe80::1%eth0]"),
        ("a:0,b:-1", "-H: slots must be a number from 1 to 4096, but 'b:-1' has '-1'"),
    ],
)
def test_words_that_are_no_hosts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_hosts(text)


def test_a_file_names_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# of the lab\n\nnode1 slots=4 max_slots=8\nnode2:2   # the small one\n\tnode3\n[fd00::4] slots=1\nnode2 slots=1\n")
    assert list(read_hostfile(path)) == [Host("node1", 4), Host("node2", 3), Host("node3"), Host("fd00::4", 1)]


def test_all_mistakes_of_a_file_are_named_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=4\nb slots=none\nc:2 slots=2\n# d\ne processors=3\n-oProxyCommand=x\n")
    with pytest.raises(ConfigError) as caught:
        read_hostfile(path)
    said = str(caught.value)
    for line, what in ((2, "'none'"), (3, "says twice"), (5, "processors=3"), (6, "must be a name")):
        assert re.search(f"{re.escape(str(path))}:{line}: [^;]*{re.escape(what)}", said), said
    assert f"{path}:1:" not in said


def test_files_without_hosts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nobody\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, message in (("empty", "names no host"), ("absent", "cannot be read: No such file"), ("binary", "cannot be read")):
        with pytest.raises(ConfigError, match=message):
            read_hostfile(tmp_path / name)


@pytest.mark.parametrize(
    ("slots", "nproc", "ranks"),
    [([4, 4], None, (4, 4)), ([4, 4], 8, (4, 4)), ([4, 4], 5, (4, 1)), ([4, 4, 4], 4, (4, 0, 0)), ([1, 3], 2, (1, 1))],
)
def test_ranks_fill_host_by_host(slots: list[int], nproc: int | None, ranks: tuple[int, ...]) -> None:
    assert deal(slots, nproc) == ranks


def options(text: str, **others: object) -> LaunchOptions:
    return LaunchOptions("train.py", hosts=read_hosts(text), **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "others", "ranks"),
    [
        ("a,b", {}, (1, 1)),
        ("a,b", {"nproc": 4}, (2, 2)),
        ("a,b", {"nproc": 5}, (3, 2)),
        ("a:1,b:3", {}, (1, 3)),
        ("a:4,b:4", {"nproc_per_node": "1"}, (1, 1)),
        ("a,b", {"nproc_per_node": "auto"}, (8, 2)),
        ("a,b", {"nproc_per_node": "cpu"}, (4, 16)),
    ],
)
def test_slots_are_those_of_the_host_or_of_what_it_has(text: str, others: dict[str, object], ranks: tuple[int, ...]) -> None:
    assert deal_ranks(options(text, **others), [(4, 8), (16, 2)]) == ranks


def test_more_ranks_than_slots_are_refused() -> None:
    with pytest.raises(ConfigError, match="-np 9 is more than the 8 slots"):
        deal_ranks(options("a:4,b:4", nproc=9))
    with pytest.raises(ConfigError, match="--nproc-per-node 5 is 5 on b, which has 4 slots"):
        deal_ranks(options("a:8,b:4", nproc_per_node="5"))


def test_this_machine_is_found_by_name() -> None:
    hosts = read_hosts("a,me@b,c")
    assert find_here(hosts, {"b"}.__contains__) == [1]
    assert find_here(hosts, set().__contains__) == []
    assert find_here(read_hosts("a:4"), {"a"}.__contains__) == [0]
    with pytest.raises(ConfigError, match=r"a and c are all this machine; .*127\.0\.1\.1"):
        find_here(hosts, {"a", "c"}.__contains__)
