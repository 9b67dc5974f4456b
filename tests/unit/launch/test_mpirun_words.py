"""The words of Open MPI's mpirun, one by one, and the line of a tutorial as a whole."""

import re

import pytest

import hora.launch.job
from hora.errors import ConfigError
from hora.launch.command import command
from hora.launch.console import run_command
from hora.launch.hosts import Host
from hora.launch.mpirun_words import read_exports, read_mca, read_placement
from hora.launch.options import LaunchOptions


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


@pytest.mark.parametrize(
    ("bind_to", "map_by", "bind"), [(None, None, "none"), ("none", "slot", "none"), ("core", None, "core"), ("numa", "slot", "numa")]
)
def test_placement_as_hora_does_it_is_accepted(bind_to, map_by, bind):
    assert read_placement(bind_to, map_by) == bind


def test_other_placement_is_answered_all_at_once():
    with pytest.raises(ConfigError, match=r"--bind-to hwthread: Hora binds .*; -map-by socket: Hora numbers"):
        read_placement("hwthread", "socket")


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


@pytest.fixture
def asked(monkeypatch):
    options: list[LaunchOptions] = []

    def launch(given: LaunchOptions) -> int:
        options.append(given)
        return 0

    monkeypatch.setattr(hora.launch.job, "launch", launch)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/lib")
    return options


TUTORIAL = (
    "-np 2 -H 10.0.0.1:1,10.0.0.2:1 -bind-to none -map-by slot -x NCCL_DEBUG=INFO -x LD_LIBRARY_PATH -mca pml ob1 -mca btl tcp,self "
    "-mca btl_tcp_if_include lo python train.py --config small"
)


def test_line_of_a_tutorial_is_understood(asked):
    assert run_command(command, TUTORIAL.split(), name="hora run") == 0
    [options] = asked
    assert (options.nproc, options.hosts, options.bind, options.interface) == (2, (Host("10.0.0.1", 1), Host("10.0.0.2", 1)), "none", "lo")
    assert (options.target, options.args) == ("train.py", ("--config", "small"))
    assert options.exports["NCCL_DEBUG"] == "INFO"
    assert options.exports["LD_LIBRARY_PATH"] == "/lib"
    assert options.exports["GLOO_SOCKET_IFNAME"] == options.exports["NCCL_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("-H localhost:2 --nnodes 2 train.py", "contradicts --nnodes"),
        ("-H localhost:2 --nr 1 train.py", "contradicts --nnodes and --node-rank"),
        ("-H localhost:2 --hostfile hosts train.py", "contradict each other"),
        ("--rsh rsh --remote-python python train.py", "--rsh and --remote-python need the hosts"),
        ("-np auto --nproc-per-node 3 train.py", "contradict each other"),
        ("-np two train.py", "-np must be a number or `auto`, but is 'two' instead"),
        ("--bind socket train.py", "Hora binds ranks to none, core or numa"),
        ("--mpi -H a,b train.py", "--mpi is for one node"),
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
    assert (asked[0].nproc, asked[0].nproc_per_node, asked[0].hosts) == (4, "2", (Host("10.0.0.2"), Host("10.0.0.1")))
    assert asked[0].target == "train.py"


def test_line_of_an_old_tutorial_is_understood(asked):
    assert run_command(command, ["--nodes", "2", "--gpus", "2", "--nr", "1", "train.py", "--nodes", "7"], name="hora run") == 0
    assert (asked[0].num_nodes, asked[0].nproc_per_node, asked[0].node_rank) == (2, "2", 1)
    assert asked[0].args == ("--nodes", "7")


@pytest.mark.parametrize("words", [["-np", "auto"], ["-n", "auto", "--nproc-per-node", "auto"], ["-ppn", "auto"]])
def test_ranks_may_be_left_to_be_counted(asked, words):
    assert run_command(command, [*words, "train.py"], name="hora run") == 0
    assert (asked[0].nproc, asked[0].nproc_per_node) == (None, "auto")


def test_a_host_file_names_the_hosts(asked, tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\nb:3\n")
    assert run_command(command, ["--hostfile", str(tmp_path / "hosts"), "--bind", "core", "train.py"], name="hora run") == 0
    assert (asked[0].hosts, asked[0].bind) == ((Host("a", 2), Host("b", 3)), "core")
