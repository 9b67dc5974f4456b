from pathlib import Path

import pytest

from hora.comm.meeting import Alone, AtAgent, AtFile, AtLauncher, AtRankZero
from hora.comm.places import find_place, first_host
from hora.errors import ConfigError

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
HORA = {
    "HORA_RENDEZVOUS": "unix:///run/job/store",
    "HORA_KEY_FILE": "/run/job/key",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "HORA_NODE_RANK": "0",
    "HORA_NUM_NODES": "1",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node-4711@1",
    "HORA_STATE_DIR": "/state",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "HORA_STATE_DIR": "/state"}


def find(environ, init_method=None, rank=None, world_size=None, parent_pid=0):
    return find_place(init_method, rank, world_size, environ, parent_pid)


def test_process_that_nobody_started_is_alone():
    place = find({})
    assert (place.topology.world_size, place.meeting) == (1, Alone())


@pytest.mark.parametrize("init_method", ["env://", "tcp://127.0.0.1:1", "file:///x"])
def test_world_of_one_meets_nobody(init_method):
    assert find({}, init_method, 0, 1).meeting == Alone()


def test_launcher_is_met_at_its_address_with_its_key():
    place = find(HORA)
    assert place.meeting == AtLauncher("unix:///run/job/store", "/run/job/key")
    assert (place.topology.rank, place.topology.local_rank, place.local_known) == (1, 1, True)


def test_launcher_without_a_key_is_refused():
    environ = {name: value for name, value in HORA.items() if name != "HORA_KEY_FILE"}
    with pytest.raises(ConfigError, match="HORA_KEY_FILE is not set; start with `hora run`"):
        find(environ)


def test_torchrun_is_met_at_its_agent():
    place = find(TORCHRUN)
    assert place.meeting == AtAgent("10.0.0.1", 29500)
    assert (place.topology.node_rank, place.topology.num_nodes, place.local_known) == (1, 2, True)


def test_torchrun_without_an_agent_store_meets_at_rank_0():
    assert find(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).meeting == AtRankZero("tcp://10.0.0.1:29500", several_nodes=True)


@pytest.mark.parametrize("method", [None, "env://"])
def test_bare_variables_meet_at_the_master(method):
    place = find({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "5000"}, method)
    assert place.meeting == AtRankZero("tcp://[::1]:5000")
    assert not place.local_known


def test_env_method_takes_rank_and_world_size_from_the_call():
    place = find({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, "env://", 1, 3)
    assert (place.topology.rank, place.topology.world_size, place.meeting) == (1, 3, AtRankZero("tcp://a:1"))


@pytest.mark.parametrize(
    ("name", "value", "message"), [("MASTER_ADDR", "", "MASTER_ADDR is not set"), ("MASTER_PORT", "70000", "from 1 to 65535")]
)
def test_master_must_be_whole(name, value, message):
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"} | {name: value}
    with pytest.raises(ConfigError, match=message):
        find(environ)


@pytest.mark.parametrize(
    ("method", "meeting"),
    [
        ("tcp://10.1.2.3:4567", AtRankZero("tcp://10.1.2.3:4567")),
        ("tcp://[fe80::1]:4567", AtRankZero("tcp://[fe80::1]:4567")),
        ("file:///shared/store", AtFile(Path("/shared/store"))),
    ],
)
def test_urls_say_where_to_meet(method, meeting):
    assert find({}, method, 1, 2).meeting == meeting
    assert find({}, f"{method}?rank=1&world_size=2").meeting == meeting
    assert find(MPICH, method).meeting == meeting


@pytest.mark.parametrize(
    ("method", "rank", "world_size", "message"),
    [
        (None, 0, 2, "need an init_method"),
        ("tcp://h:1", 0, None, "needs world_size as well"),
        ("tcp://h:1", None, None, "needs rank and world_size as well"),
        ("tcp://h:1", 2, 2, "rank must be from 0 to world_size - 1 = 1, but is 2"),
        ("tcp://h:1", 0, 0, "world_size must be at least 1"),
        ("tcp://h", 0, 2, "must read tcp://host:port"),
        ("tcp://h:x", 0, 2, "must read tcp://host:port"),
        ("http://h:1", 0, 2, "must be one of env://, tcp://host:port, file:///path"),
    ],
)
def test_impossible_arguments_are_refused(method, rank, world_size, message):
    with pytest.raises(ConfigError, match=message):
        find({}, method, rank, world_size)


def test_slurm_on_several_nodes_meets_at_the_first_host():
    meeting = find(SLURM).meeting
    assert isinstance(meeting, AtRankZero)
    host, port = meeting.address.removeprefix("tcp://").split(":")
    assert host == "gpu03"
    assert 10000 <= int(port) < 30000
    assert find(SLURM | {"SLURM_PROCID": "0"}).meeting == meeting
    assert find(SLURM | {"SLURM_JOB_ID": "78"}).meeting != meeting


@pytest.mark.parametrize(("node", "ranks"), [(0, 1), (1, 3), (2, 3), (3, 2), (9, 2)])
def test_slurm_says_how_many_ranks_each_node_has(node, ranks):
    uneven = {"SLURM_STEP_TASKS_PER_NODE": "1,3(x2),2", "SLURM_NODEID": str(node), "SLURM_NTASKS": "20", "SLURM_STEP_NUM_NODES": "10"}
    topology = find(SLURM | uneven | {"SLURM_LOCALID": str(ranks - 1)}).topology
    assert (topology.local_world_size, topology.local_rank) == (ranks, ranks - 1)


@pytest.mark.parametrize("text", ["", "2(x2", "2,", "(x2)", "-1", "2(x)"])
def test_a_count_that_slurm_would_not_write_is_named(text):
    with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE must be an integer from 0"):
        find(SLURM | {"SLURM_STEP_TASKS_PER_NODE": text})


def test_a_node_that_is_no_number_is_named():
    with pytest.raises(ConfigError, match="SLURM_NODEID must be an integer from 0, but is 'x'"):
        find(SLURM | {"SLURM_NODEID": "x"})


def test_nodes_are_known_where_the_launcher_has_named_them():
    environs = {"hora": HORA, "torchrun": TORCHRUN, "slurm": SLURM, "openmpi": OPENMPI, "mpich": MPICH}
    assert [name for name, environ in environs.items() if find(environ).node_known] == ["hora", "torchrun", "slurm"]


def test_slurm_with_a_master_meets_there():
    assert find(SLURM | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}).meeting == AtRankZero("tcp://a:1", several_nodes=True)


def test_mpi_on_one_node_meets_at_a_socket_of_the_user():
    meeting = find(OPENMPI).meeting
    assert meeting.address.startswith("unix:///state/sockets/job-")
    assert find(OPENMPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}).meeting == meeting
    assert find(OPENMPI | {"PMIX_NAMESPACE": "another"}).meeting != meeting


def test_mpich_jobs_are_told_apart_by_their_parent():
    assert find(MPICH, parent_pid=5).meeting == find(MPICH | {"PMI_RANK": "0"}, parent_pid=5).meeting
    assert find(MPICH, parent_pid=5).meeting != find(MPICH, parent_pid=6).meeting


def test_one_node_without_unix_sockets_meets_on_loopback():
    assert find(OPENMPI | {"HORA_PORTABLE": "1"}).meeting.address.startswith("tcp://127.0.0.1:")


def test_mpi_on_several_nodes_asks_for_a_master():
    with pytest.raises(ConfigError, match="openmpi does not say where rank 0 of 2 nodes is; set MASTER_ADDR"):
        find(OPENMPI | {"OMPI_COMM_WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("one", "one"),
        ("a,b", "a"),
        ("gpu[03-05,9],login", "gpu03"),
        ("gpu[7]", "gpu7"),
        ("a,gpu[1-2]", "a"),
        ("r[1-2]n,x", "r1n"),
        ("r[1-2]n[7,9-10],x", "r1n7"),
        ("", ""),
    ],
)
def test_first_host_of_a_node_list(node_list, host):
    assert first_host(node_list) == host


def test_torchrun_says_how_many_nodes_there_are_where_they_are_uneven():
    """Of 5 ranks 3 are on the first node and 1 on each of two others; counting by one's own node would find 2 or 5 nodes."""
    for rank, node, local in ((0, 0, 3), (3, 1, 1), (4, 2, 1)):
        places = {"RANK": rank, "WORLD_SIZE": 5, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local, "GROUP_RANK": node, "GROUP_WORLD_SIZE": 3}
        variables = {name: str(value) for name, value in places.items()} | {
            "TORCHELASTIC_RUN_ID": "x",
            "MASTER_ADDR": "a",
            "MASTER_PORT": "1",
        }
        topology = find(variables).topology
        assert (topology.node_rank, topology.num_nodes) == (node, 3)


def test_a_pod_of_a_pytorch_job_finds_its_place():
    """As Kubernetes' training operator sets variables: no local rank, one rank a pod."""
    pod = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456", "PYTHONUNBUFFERED": "1"}
    place = find(pod)
    assert (place.topology.rank, place.topology.world_size, place.local_known) == (1, 3, False)
    assert place.meeting == AtRankZero("tcp://train-master-0:23456")
