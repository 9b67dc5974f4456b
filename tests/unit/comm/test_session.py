"""A process alone: the same calls as with many ranks, without a socket."""

import sys

import psutil
import pytest
import torch
import torch.distributed as dist
from rank_records import record
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import hora
from hora.comm import session
from hora.comm.backends.gloo import Gloo
from hora.errors import ConfigError, HoraError


@pytest.fixture
def alone(monkeypatch):
    """A session on the CPU in a process that nobody started."""
    for name in ("RANK", "WORLD_SIZE", "HORA_RENDEZVOUS", "TORCHELASTIC_RUN_ID", "HORA_TIMEOUT_S"):
        monkeypatch.delenv(name, raising=False)
    yield hora.init(device="cpu")
    hora.shutdown()


@pytest.fixture(autouse=True)
def no_session_afterwards():
    """A test that fails half-way takes no other with it."""
    yield
    hora.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def test_process_alone_is_rank_0_of_1(alone):
    assert (hora.rank(), hora.world_size(), hora.local_rank(), hora.device()) == (0, 1, 0, torch.device("cpu"))
    assert (alone.backend, alone.topology.source, alone.generation, alone.timeout_s) == ("solo", "alone", 0, 300.0)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "solo")


def test_process_alone_opens_no_socket_and_no_thread(monkeypatch):
    process = psutil.Process()
    descriptors, threads = process.num_fds(), process.num_threads()
    sockets = {connection.fd for connection in process.net_connections(kind="all")}  # of the ranks kept for other tests
    hora.init(device="cpu")
    hora.all_reduce(torch.ones(2))
    hora.barrier()
    try:
        assert {connection.fd for connection in process.net_connections(kind="all")} == sockets
        assert (process.num_fds(), process.num_threads()) == (descriptors, threads)
    finally:
        hora.shutdown()


def test_accessors_before_init_say_what_to_call(monkeypatch):
    assert not hora.is_initialized()
    for ask in (hora.session, hora.rank, hora.world_size, hora.local_rank, hora.device, lambda: hora.all_reduce(torch.ones(1))):
        with pytest.raises(HoraError, match=r"call hora.init\(\) first"):
            ask()
    monkeypatch.setattr(session, "get_worker_info", lambda: "a worker's")
    with pytest.raises(HoraError, match="was not forked from its rank.*give the data set what it needs"):
        hora.rank()


def test_second_init_returns_the_session_and_refuses_arguments(alone):
    assert hora.init() is alone
    with pytest.raises(ConfigError, match=r"a second time with arguments; call hora.shutdown\(\) first"):
        hora.init(backend="solo")


def test_init_and_shutdown_any_number_of_times():
    for _ in range(3):
        with_session = hora.init(device="cpu")
        assert hora.all_reduce(torch.ones(1)).item() == 1.0
        hora.shutdown()
        hora.shutdown()
        assert not dist.is_initialized()
        with pytest.raises(HoraError, match="the session is closed and has no group any more"):
            _ = with_session.group


def test_closed_session_keeps_no_model_alive(alone):
    model = torch.nn.Linear(1, 1)
    alone.synchronizers[model] = object()
    hora.shutdown()
    assert len(alone.synchronizers) == 0


def test_failed_init_leaves_nothing_and_can_be_repeated():
    with pytest.raises(ConfigError):
        hora.init(backend="nvcl")
    assert not hora.is_initialized()
    assert not dist.is_initialized()
    hora.init(device="cpu")
    hora.shutdown()


@pytest.mark.parametrize("value", ["soon", "-1", "0", "nan", "inf", "1e20"])
def test_timeouts_that_are_none_are_refused(monkeypatch, value):
    monkeypatch.setenv("HORA_TIMEOUT_S", value)
    with pytest.raises(ConfigError, match="HORA_TIMEOUT_S must be a positive number of seconds"):
        hora.init(device="cpu")
    with pytest.raises(ConfigError, match="timeout_s must be a positive number of seconds"):
        hora.init(device="cpu", timeout_s=-1.0)


@pytest.mark.parametrize("name", ["HORA_GENERATION", "HORA_NODE_RANK", "HORA_NUM_NODES", "TORCHELASTIC_RESTART_COUNT"])
@pytest.mark.parametrize("value", ["-1", "x", "1.5", "9" * 5000])
def test_numbers_of_a_launcher_that_are_none_are_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name} must be an integer from 0, but is '{value[:80]}'"):
        hora.init(device="cpu")


def test_timeout_comes_from_the_variable(monkeypatch):
    monkeypatch.setenv("HORA_TIMEOUT_S", "12.5")
    assert hora.init(device="cpu").timeout_s == 12.5
    hora.shutdown()


def test_init_where_the_script_is_only_imported_is_refused(monkeypatch):
    monkeypatch.setattr(sys.modules["multiprocessing"].current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ConfigError, match="__main__"):
        hora.init(device="cpu")


def test_group_of_the_users_script_is_adopted_and_left():
    hora.init(device="cpu")
    hora.shutdown()
    dist.init_process_group("solo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert hora.init(device="cpu").topology.source == "torch.distributed"
        hora.shutdown()
        assert dist.is_initialized()
        with pytest.raises(ConfigError, match="torch.distributed has been initialised already"):
            hora.init(backend="gloo")
    finally:
        dist.destroy_process_group()


def test_one_rank_may_ask_for_gloo():
    hora.init(backend="gloo")
    try:
        assert dist.get_backend() == "gloo"
        assert hora.all_reduce(torch.ones(1)).item() == 1.0
    finally:
        hora.shutdown()


def test_torch_collectives_are_the_identity_alone(alone):
    tensor = torch.arange(3.0)
    assert dist.all_reduce(tensor, async_op=True).wait()
    dist.broadcast(tensor, 0)
    dist.reduce(tensor, 0)
    gathered = [torch.zeros(3)]
    dist.all_gather(gathered, tensor)
    collected = [torch.zeros(3)]
    dist.gather(tensor, collected, 0)
    scattered, reduced, swapped = torch.zeros(3), torch.zeros(3), [torch.zeros(3)]
    dist.scatter(scattered, [tensor], 0)
    dist.reduce_scatter(reduced, [tensor])
    dist.all_to_all(swapped, [tensor])
    single = torch.zeros(3)
    dist.all_to_all_single(single, tensor)
    dist.barrier()
    for result in (tensor, gathered[0], collected[0], scattered, reduced, swapped[0], single):
        assert result.tolist() == [0.0, 1.0, 2.0]


def test_futures_of_torch_collectives_are_done_alone(alone):
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work.is_completed()
    assert work.get_future().wait()[0].tolist() == [1.0, 1.0]


def test_functional_collectives_and_subgroups_work_alone(alone):
    group = dist.new_group([0])
    assert functional.all_reduce(torch.ones(2), "sum", group).tolist() == [1.0, 1.0]
    gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)
    assert gather(torch.ones(2), 0, group).tolist() == [1.0, 1.0]
    assert dist.get_process_group_ranks(group) == [0]


def test_distributed_data_parallel_works_alone(alone):
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.0, 1.0]]


def test_the_way_to_rank_zero_counts_where_the_names_of_the_others_lead_nowhere(monkeypatch):
    ways = {"10.0.0.7": "eth7"}
    monkeypatch.setattr(
        session, "choose_interface", lambda peers: next((ways[peer] for peer in peers if peer in ways), None if peers else "lo")
    )
    mine, other, zero = record(2, host="c", node_rank=2), record(1, host="b", node_rank=1), record(0, host="a")

    def chosen(records, host_of_zero):
        return session._socket_variables(Gloo(), mine, records, host_of_zero).get("GLOO_SOCKET_IFNAME")

    assert chosen([zero, other, mine], "10.0.0.7") == "eth7"
    assert chosen([zero, other, mine], None) is None
    assert chosen([mine], "10.0.0.7") == "lo"
    alike = [record(0, host="c"), mine]
    assert chosen(alike, "10.0.0.7") == "eth7"
    assert chosen(alike, "127.0.0.1") == chosen(alike, None) == "lo"
