import pytest
import torch
from rank_records import record

from hora.comm.backends import choose_backend
from hora.comm.backends.gloo import Gloo
from hora.comm.backends.nccl import Nccl
from hora.comm.devices import choose_backend_and_device, settle_device
from hora.errors import ConfigError

CUDA = torch.device("cuda")


@pytest.fixture
def gpus(monkeypatch):
    """A machine with GPUs, as far as choosing goes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def chosen(backend=None, device=None, world_size=2) -> tuple[str, str]:
    found, place = choose_backend_and_device(backend, device and torch.device(device), world_size)
    return found.name, str(place)


@pytest.mark.usefixtures("no_gpus")
def test_cpus_get_shm_and_one_rank_gets_solo():
    assert chosen() == ("shm", "cpu")
    assert chosen(world_size=1) == ("solo", "cpu")
    assert chosen("gloo", world_size=1) == ("gloo", "cpu")


@pytest.mark.usefixtures("gpus")
def test_gpus_get_nccl_unless_something_else_is_asked_for():
    assert chosen() == ("nccl", "cuda")
    assert chosen(world_size=1) == ("solo", "cuda")
    assert chosen("gloo") == ("gloo", "cpu")
    assert chosen("nccl") == ("nccl", "cuda")
    assert chosen(device="cpu") == ("shm", "cpu")
    assert chosen(device="cuda:3") == ("nccl", "cuda:3")


@pytest.mark.usefixtures("no_gpus")
def test_backend_that_cannot_be_used_is_refused_with_those_that_can():
    with pytest.raises(
        ConfigError, match=r'backend "nccl" is not available .* Available here: shm, gloo; not available: solo \(.*\), nccl \(.*\)'
    ):
        chosen("nccl")
    with pytest.raises(ConfigError, match=r'backend "solo" .* solo \(it serves one rank alone\)'):
        chosen("solo")
    with pytest.raises(ConfigError, match=r'backend "gloo" .* gloo \(it serves cpu, not cuda\)'):
        chosen("gloo", device="cuda")


def test_unknown_backend_is_refused_with_the_list():
    with pytest.raises(ConfigError, match='unknown backend "nvcl"; choose one of: solo, nccl, shm, gloo, mpi'):
        choose_backend("nvcl", None, 2)


def test_device_nobody_serves_is_refused():
    with pytest.raises(ConfigError, match=r"a backend for meta is not available .* gloo \(it serves cpu, not meta\)"):
        chosen(device="meta")


def test_sockets_of_backends_are_bound_to_the_interface():
    assert Gloo().environment("eth1") == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert Nccl().environment("eth1") == {"NCCL_SOCKET_IFNAME": "=eth1", "GLOO_SOCKET_IFNAME": "eth1"}


def node(*visible: str | None, num_gpus: int) -> list:
    return [record(rank, num_gpus=num_gpus, visible_gpus=shown) for rank, shown in enumerate(visible)]


def test_rank_gets_the_gpu_of_its_local_rank():
    ranks = node(None, None, num_gpus=2)
    assert [settle_device(CUDA, rank, ranks) for rank in (0, 1)] == [(torch.device("cuda", 0), 0), (torch.device("cuda", 1), 0)]


def test_device_with_a_number_and_the_cpu_are_kept():
    ranks = node(None, num_gpus=8)
    assert settle_device(torch.device("cuda:7"), 0, ranks) == (torch.device("cuda:7"), 0)
    assert settle_device(torch.device("cpu"), 0, ranks) == (torch.device("cpu"), 0)


def test_gpu_with_a_number_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="rank 0 is to work on cuda:2, but node1 shows 2 GPUs to it"):
        settle_device(torch.device("cuda:2"), 0, node(None, num_gpus=2))


def test_scheduler_that_shows_each_rank_one_gpu_is_understood():
    assert settle_device(CUDA, 1, node("0", "1", num_gpus=1)) == (torch.device("cuda", 0), 0)


@pytest.mark.parametrize("ranks", [node("0", "0", num_gpus=1), node(None, None, num_gpus=1), node("0,1", "2,3", num_gpus=0)])
def test_more_ranks_than_gpus_are_refused(ranks):
    remedy = (
        "(start fewer ranks there, or let them share it with HORA_SHARE_GPUS=1, .*|see what hora doctor says of its GPUs), or work on CPUs"
    )
    with pytest.raises(ConfigError, match=rf"node1 shows \d to its 2 ranks; {remedy}"):
        settle_device(CUDA, 1, ranks)


def test_a_rank_with_a_gpu_refuses_too_where_another_has_none():
    with pytest.raises(ConfigError, match="node1 shows 1 to its 2 ranks"):
        settle_device(CUDA, 0, node(None, None, num_gpus=1))


def test_ranks_share_gpus_where_they_may():
    ranks = [record(rank, num_gpus=2, shares_gpus=True) for rank in range(5)]
    assert [settle_device(CUDA, rank, ranks) for rank in range(5)] == [
        (torch.device("cuda", number), turn) for turn, number in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))
    ]
    with pytest.raises(ConfigError, match="shows 0 to its 2 ranks"):
        settle_device(CUDA, 1, [record(rank, num_gpus=0, shares_gpus=True) for rank in range(2)])


def test_ranks_of_one_gpu_pass_for_ranks_of_several_hosts():
    assert Nccl().environment_on_shared_gpu(0) == {}
    assert len({Nccl().environment_on_shared_gpu(turn)["NCCL_HOSTID"] for turn in (1, 2, 3)}) == 3
