"""Who runs where, with which environment: the pure plan."""

from dataclasses import replace

import pytest

from hora import env
from hora.errors import ConfigError
from hora.launch.options import LaunchOptions
from hora.launch.plan import JobFacts, Layout, count_ranks, plan_ranks, threads_per_rank
from hora.topology import Topology

FACTS = JobFacts(
    job_id="4f",
    job_dir="/tmp/hora-4f",
    rendezvous="unix:///tmp/hora-4f/rendezvous.sock",
    key_file="/tmp/hora-4f/key",
    master_addr="node0",
    master_port=4711,
    launcher_pid=99,
)


def count(*, cores: int = 8, gpus: int = 0, **options: object) -> int:
    return count_ranks(LaunchOptions("train.py", **options), cores=cores, gpus=gpus)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({}, 1),
        ({"nproc": 4}, 4),
        ({"nproc_per_node": "3"}, 3),
        ({"nproc": 6, "num_nodes": 2}, 3),
        ({"nproc": 6, "num_nodes": 2, "nproc_per_node": "3"}, 3),
        ({"nproc_per_node": "cpu"}, 8),
        ({"nproc_per_node": "auto"}, 8),
        ({"nproc_per_node": "auto", "gpus": 2}, 2),
        ({"nproc_per_node": "gpu", "gpus": 2}, 2),
    ],
)
def test_ranks_of_a_node_are_counted(options: dict[str, object], ranks: int) -> None:
    assert count(**options) == ranks  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nproc_per_node": "0"}, "--nproc-per-node must be a number from 1"),
        ({"nproc_per_node": "-1"}, "but is '-1' instead"),
        ({"nproc_per_node": "two"}, "but is 'two' instead"),
        ({"nproc_per_node": "9" * 5000}, "--nproc-per-node must be a number from 1"),
        ({"nproc_per_node": "²"}, "but is '²' instead"),
        ({"nproc_per_node": "gpu"}, "needs a GPU, but none is visible"),
        ({"nproc": 5, "num_nodes": 2}, "must be a multiple of --nnodes 2"),
        ({"nproc": 6, "num_nodes": 2, "nproc_per_node": "2"}, "is 3 a node, but --nproc-per-node is 2"),
    ],
)
def test_numbers_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        count(**options)  # type: ignore[arg-type]


def test_all_wrong_options_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        LaunchOptions(
            "",
            nproc=0,
            num_nodes=0,
            node_rank=3,
            master_port=70000,
            master_addr="-oProxyCommand=x",
            grace_s=-1.0,
            join_timeout_s=float("nan"),
        )
    for name in ("script", "--nnodes", "--node-rank", "--master-port", "--master-addr", "-np", "--grace", "--join-timeout"):
        assert name in str(caught.value)


@pytest.mark.parametrize("name", ["a;touch p", "$(id)", "a b", "", "-h", "a/b", "a\nb"])
def test_hostile_addresses_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--master-addr"):
        LaunchOptions("train.py", master_addr=name)


def test_ranks_are_numbered_node_by_node() -> None:
    plans = plan_ranks(Layout.even(num_nodes=3, node_rank=1, ranks_per_node=2), ["python"], FACTS, {}, cores=8)
    assert [(plan.rank, plan.local_rank) for plan in plans] == [(2, 0), (3, 1)]
    places = [Topology.from_env(plan.environ) for plan in plans]
    assert places == [Topology(2, 6, 0, 2, 1, 3, "hora"), Topology(3, 6, 1, 2, 1, 3, "hora")]


def test_a_rank_is_told_everything_that_it_needs() -> None:
    (plan,) = plan_ranks(Layout.even(1, 0, 1), ["python", "train.py"], FACTS, {}, cores=8)
    assert plan.command == ("python", "train.py")
    assert plan.environ == {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0", "GROUP_RANK": "0",
        "MASTER_ADDR": "node0", "MASTER_PORT": "4711", "OMP_NUM_THREADS": "8",
        env.JOB_ID: "4f", env.JOB_DIR: "/tmp/hora-4f", env.KEPT_DIR: "", env.RENDEZVOUS: "unix:///tmp/hora-4f/rendezvous.sock",
        env.KEY_FILE: "/tmp/hora-4f/key", env.GENERATION: "0", env.NODE_RANK: "0", env.NUM_NODES: "1", env.LAUNCHER_PID: "99",
    }  # fmt: skip


def test_what_outlives_generations_is_that_of_this_job_and_no_others() -> None:
    outer = {env.KEPT_DIR: "/of/another/job"}
    for kept, told in ((None, ""), ("/tmp/kept", "/tmp/kept")):
        (plan,) = plan_ranks(Layout.even(1, 0, 1), ["python"], replace(FACTS, kept_dir=kept), outer, cores=1)
        assert plan.environ[env.KEPT_DIR] == told


def test_the_users_environment_is_kept() -> None:
    before = {"PYTHONPATH": "/mine:/yours", "OMP_NUM_THREADS": "5", "RANK": "7", "TOKEN": "secret", "GLOO_SOCKET_IFNAME": "eth1"}
    loopback = JobFacts(**vars(FACTS) | {"interface": "lo"})
    (plan,) = plan_ranks(Layout.even(1, 0, 1), ["python"], loopback, before, cores=8)
    assert plan.environ.items() >= (before | {"RANK": "0", "NCCL_SOCKET_IFNAME": "lo"}).items()
    assert before["RANK"] == "7"
    assert "secret" not in repr(plan)


def test_what_scripts_leave_to_the_launcher_is_told() -> None:
    before = {env.SHARED_DIR: "/mine"}
    (plan,) = plan_ranks(Layout.even(1, 0, 1), ["python"], FACTS, before, cores=8)
    assert plan.environ[env.SHARED_DIR] == "/mine"
    facts = JobFacts(**vars(FACTS) | {"shared_dir": "/shared", "logical_ranks": 4})
    (plan,) = plan_ranks(Layout.even(1, 0, 1), ["python"], facts, before, cores=8)
    assert (plan.environ[env.SHARED_DIR], plan.environ[env.EXACT]) == ("/shared", "4")


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, 4), (8, 3, 2), (2, 2, 1), (2, 4, 1), (1, 1, 1)])
def test_cores_are_dealt_to_the_ranks(cores: int, ranks: int, threads: int) -> None:
    assert threads_per_rank(cores, ranks) == threads
