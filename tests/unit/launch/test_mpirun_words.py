"""The words of Open MPI's mpirun, one by one, and the line of a tutorial as a whole."""

import re
from typing import Any

import pytest

import hora.launch.job
from hora.errors import ConfigError
from hora.launch import ports
from hora.launch.command import command
from hora.launch.console import run_command
from hora.launch.mpirun_words import Hosts, check_placement, read_exports, read_hosts, read_mca
from hora.launch.plan import LaunchOptions


def test_variables_are_set_or_passed():
    environ = {"PATH": "/bin", "OTHER": "1"}
    assert read_exports(["NCCL_DEBUG=INFO", "PATH", "LD_LIBRARY_PATH", "EMPTY="], environ) == {
        "NCCL_DEBUG": "INFO",
        "PATH": "/bin",
        "EMPTY": "",
    }


@pytest.mark.parametrize("word", ["=1", "A,B", "-np", ""])
def test_word_that_is_no_variable_is_refused(word):
    with pytest.raises(ConfigError, match="one variable to each -x"):
        read_exports([word], {})


def test_placement_as_hora_does_it_is_accepted():
    check_placement(None, None)
    check_placement("none", "slot")


def test_other_placement_is_answered_all_at_once():
    with pytest.raises(ConfigError, match=r"-bind-to core: Hora binds .*; -map-by socket: Hora numbers"):
        check_placement("core", "socket")


@pytest.mark.parametrize(
    ("pairs", "interface"),
    [
        ([], None),
        ([("btl_tcp_if_include", "eth0")], "eth0"),
        ([("pml", "ob1"), ("btl", "tcp,self"), ("btl_tcp_if_include", "ens3")], "ens3"),
    ],
)
def test_interface_is_found(pairs, interface):
    assert read_mca(pairs) == interface


@pytest.mark.parametrize(
    ("pair", "answer"),
    [
        (("btl_tcp_if_exclude", "lo,docker0"), "with --interface"),
        (("btl_tcp_if_include", "10.0.0.0/8"), "name one interface"),
        (("pml", "ucx"), "sets up Open MPI, which `hora run` does not use"),
        (("plm_rsh_agent", "ssh"), "Open MPI's own mpirun"),
    ],
)
def test_other_settings_are_answered(pair, answer):
    with pytest.raises(ConfigError, match=re.escape(answer)):
        read_mca([pair])


def here(*hosts: str) -> Any:
    return lambda host: host in hosts


@pytest.mark.parametrize(
    ("text", "local", "found"),
    [
        ("localhost:2", ["localhost"], Hosts(1, 0, None, 2)),
        ("localhost", ["localhost"], Hosts(1, 0, None, 1)),
        ("a:2,b:2", ["b"], Hosts(2, 1, "a", 2)),
        ("a,a,b:2", ["a"], Hosts(2, 0, "a", 2)),
        ("10.0.0.1:1,10.0.0.2:1,10.0.0.3:1", ["10.0.0.3"], Hosts(3, 2, "10.0.0.1", 1)),
    ],
)
def test_hosts_are_nodes(text, local, found):
    assert read_hosts(text, here(*local)) == found
    assert found.nproc == found.num_nodes * found.slots


@pytest.mark.parametrize(
    ("text", "local", "answer"),
    [
        ("a:1,b:1", [], "this machine must be one of the hosts, but is none of them"),
        ("a:1,b:1,c:1", ["a", "b"], "but is a and b"),
        ("a:1,b:2", ["a"], "give the same number to each"),
        ("localhost:1,b:1", ["localhost", "b"], "localhost is another machine on each host"),
        ("a:0", ["a"], "host:slots"),
        (":1", [], "host:slots"),
        ("a:x", [], "host:slots"),
    ],
)
def test_hosts_that_cannot_be_are_answered(text, local, answer):
    with pytest.raises(ConfigError, match=re.escape(answer)):
        read_hosts(text, here(*local))


@pytest.fixture
def asked(monkeypatch):
    options: list[LaunchOptions] = []

    def launch(given: LaunchOptions) -> int:
        options.append(given)
        return 0

    monkeypatch.setattr(hora.launch.job, "launch", launch)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/lib")
    monkeypatch.setattr(ports, "is_this_machine", here("10.0.0.2", "localhost"))
    return options


TUTORIAL = (
    "-np 2 -H 10.0.0.1:1,10.0.0.2:1 -bind-to none -map-by slot -x NCCL_DEBUG=INFO -x LD_LIBRARY_PATH -mca pml ob1 -mca btl tcp,self "
    "-mca btl_tcp_if_include lo python train.py --config small"
)


def test_line_of_a_tutorial_is_understood(asked, capsys):
    assert run_command(command, TUTORIAL.split(), name="hora run") == 0
    [options] = asked
    assert (options.nproc, options.num_nodes, options.node_rank, options.master_addr) == (2, 2, 1, "10.0.0.1")
    assert (options.target, options.args) == ("train.py", ("--config", "small"))
    assert options.exports["NCCL_DEBUG"] == "INFO"
    assert options.exports["LD_LIBRARY_PATH"] == "/lib"
    assert options.exports["GLOO_SOCKET_IFNAME"] == options.exports["NCCL_SOCKET_IFNAME"] == "lo"
    assert "node 1 of 2; run the same command on each host" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("-np 3 -H localhost:2 train.py", "-np 3 is more than the 2 slots"),
        ("-H localhost:2 --nnodes 2 train.py", "contradict each other"),
        ("--interface nonesuch0 train.py", "no network interface 'nonesuch0'"),
        ("--mpi --nnodes 2 train.py", "--mpi is for one node"),
    ],
)
def test_contradictions_are_refused(asked, capsys, words, answer):
    assert run_command(command, words.split(), name="hora run") == 2
    assert answer in capsys.readouterr().err
    assert not asked


def test_line_of_mpiexec_is_understood(asked):
    """As MPICH has it: `-hosts` without slots, and `-ppn`."""
    assert run_command(command, ["-n", "4", "-ppn", "2", "-hosts", "10.0.0.2,10.0.0.1", "python", "train.py"], name="hora run") == 0
    assert (asked[0].nproc, asked[0].nproc_per_node, asked[0].num_nodes, asked[0].node_rank) == (4, "2", 2, 0)
    assert asked[0].target == "train.py"


def test_slots_count_the_ranks(asked):
    assert run_command(command, ["-H", "localhost:3", "--mpi", "train.py"], name="hora run") == 0
    assert (asked[0].nproc, asked[0].num_nodes, asked[0].mpi) == (3, 1, True)
