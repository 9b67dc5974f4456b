"""The store beside PyTorch's own, called from Python and, through a PrefixStore, from C++; and process groups that are made with it.

Run as a program, this file forks the ranks of jobs that each call one of its functions, so that PyTorch is imported once.
"""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hora.comm.store import RendezvousStore
from hora.rendezvous.client import Client
from hora.rendezvous.key import new_key, read_key, write_key
from hora.rendezvous.server import Server


@pytest.fixture
def key() -> bytes:
    return new_key()


@pytest.fixture
def server(key: bytes, tmp_path: Path) -> Iterator[Server]:
    tmp_path.chmod(0o700)
    with Server(f"unix://{tmp_path}/rendezvous.sock", key).start() as server:
        yield server


@pytest.fixture
def client(server: Server, key: bytes) -> Iterator[Client]:
    with Client(server.address, key, name="rank 0", timeout_s=20.0) as client:
        yield client


@pytest.fixture
def ours(client: Client) -> RendezvousStore:
    return RendezvousStore(client, timeout_s=20.0)


@pytest.fixture
def theirs() -> Any:
    """PyTorch's own store, listening at loopback alone."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def a_bit_of_everything(store: Any) -> list[Any]:
    keys_before = store.num_keys()
    store.set("text", "ä")
    store.set("bytes", b"\x00\xff")
    store.set("empty", b"")
    store.append("log", "a")
    store.append("log", b"b")
    store.multi_set(["m/1", "m/2"], ["one", b"\xfe"])
    return [
        store.get("text"),
        store.get("bytes"),
        store.get("empty"),
        store.get("log"),
        store.multi_get(["m/2", "m/1"]),
        store.add("n", 3),
        store.add("n", -5),
        store.get("n"),
        store.compare_set("absent", "expected", "desired"),
        store.compare_set("made", "", "desired"),
        store.compare_set("made", "wrong", "other"),
        store.compare_set("made", "desired", "other"),
        store.get("made"),
        store.check(["text", "n"]),
        store.check(["text", "absent"]),
        store.wait(["text", "n"]),
        store.wait(["text", "n"], timedelta(seconds=1)),
        store.num_keys() - keys_before,
        store.delete_key("text"),
        store.delete_key("text"),
        store.has_extended_api(),
    ]


def test_operations_give_what_tcp_store_gives(ours: RendezvousStore, theirs: Any) -> None:
    assert a_bit_of_everything(ours) == a_bit_of_everything(theirs)


def test_operations_give_the_same_from_cpp(ours: RendezvousStore, theirs: Any) -> None:
    assert a_bit_of_everything(dist.PrefixStore("job", ours)) == a_bit_of_everything(dist.PrefixStore("job", theirs))


def test_nested_prefixes_arrive(ours: RendezvousStore, client: Client) -> None:
    dist.PrefixStore("outer", dist.PrefixStore("inner", ours)).set("k", "v")
    assert client.keys() == ["inner/outer/k"]


WAYS_TO_WAIT: dict[str, Callable[[Any], Any]] = {
    "get": lambda store: store.get("missing"),
    "wait": lambda store: store.wait(["missing"]),
    "wait with a timeout": lambda store: store.wait(["missing"], timedelta(milliseconds=50)),
    "multi_get": lambda store: store.multi_get(["missing"]),
}


@pytest.mark.parametrize("wait", WAYS_TO_WAIT.values(), ids=WAYS_TO_WAIT.keys())
@pytest.mark.parametrize("from_cpp", [False, True])
def test_wait_that_ends_in_vain_raises_what_tcp_store_raises(
    ours: RendezvousStore, theirs: Any, wait: Callable[[Any], Any], from_cpp: bool
) -> None:
    for store in (ours, theirs):
        store.set_timeout(timedelta(milliseconds=50))
        with pytest.raises(dist.DistStoreError) as caught:
            wait(dist.PrefixStore("job", store) if from_cpp else store)
        assert isinstance(caught.value, RuntimeError)
        if store is ours:
            missing = "job/missing" if from_cpp else "missing"
            assert str(caught.value).startswith("rank 0 waited 0.1 s at the rendezvous")
            assert str(caught.value).endswith(f"for what nobody set: {missing}")


def test_lost_server_raises_the_kind_that_watchdogs_expect(ours: RendezvousStore, server: Server) -> None:
    server.close()
    for store in (ours, dist.PrefixStore("job", ours)):
        with pytest.raises(dist.DistNetworkError, match="rank 0 lost the rendezvous"):
            store.check(["k"])


def test_closed_client_raises_the_same_kind(ours: RendezvousStore, client: Client) -> None:
    client.close()
    with pytest.raises(dist.DistNetworkError, match="rank 0 has closed its connection"):
        dist.PrefixStore("job", ours).set("k", "v")


def test_waiting_in_cpp_lets_other_threads_run(ours: RendezvousStore) -> None:
    store = dist.PrefixStore("job", ours)
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.append(store.get("k")))
    waiting.start()
    dist.PrefixStore("job", ours).set("k", "v")
    waiting.join()
    assert got == [b"v"]


def test_clone_outlives_its_last_python_name_and_has_its_own_timeout(ours: RendezvousStore) -> None:
    clone = dist.PrefixStore("job", ours).clone()
    gc.collect()
    clone.set_timeout(timedelta(milliseconds=50))
    clone.set("k", "v")
    assert ours.get("job/k") == b"v"
    with pytest.raises(dist.DistStoreError):
        clone.get("missing")
    assert ours.timeout == timedelta(seconds=20)


def test_barrier_of_the_store_itself_works(ours: RendezvousStore) -> None:
    if not hasattr(dist.Store, "barrier"):
        pytest.skip("this version of PyTorch has no Store.barrier")
    threads = [threading.Thread(target=ours.barrier, args=("b", 2, timedelta(seconds=20))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ours.num_keys() > 0


# Process groups.


JOBS = ["meet_and_train 2", "meet_and_train 3", "meet_and_train 4", "meet_in_vain 3 but_1", "meet_and_leave 2"]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What all jobs printed, with a line `JOB: ok` for each that ended well."""
    folder, key = tmp_path_factory.mktemp("jobs"), new_key()
    write_key(folder / "key", key)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (
        Server(f"unix://{folder}/s", key).start() as server,
        subprocess.Popen(
            [sys.executable, __file__, server.address, folder / "key", *JOBS],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as program,
    ):
        try:
            return program.communicate(timeout=100)[0]
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            raise


@pytest.mark.parametrize("job", JOBS)
def test_gloo_works_with_the_store_where_ranks(output: str, job: str) -> None:
    assert f"{job}: ok" in output.splitlines()


def meet(store: RendezvousStore, rank: int, world_size: int, round_: str, timeout_s: float = 20.0) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"{world_size}/{round_}", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def meet_and_train(store: RendezvousStore, rank: int, world_size: int) -> None:
    for round_ in ("first", "second"):
        meet(store, rank, world_size, round_)
        total = torch.full((5,), float(rank + 1))
        dist.all_reduce(total)
        assert total.tolist() == [world_size * (world_size + 1) / 2] * 5

        pair = dist.new_group([0, world_size - 1])
        if rank in (0, world_size - 1):
            both = torch.tensor(float(rank))
            dist.all_reduce(both, group=pair)
            assert both.item() == world_size - 1

        take_a_step(rank, world_size)
        dist.barrier()
        dist.monitored_barrier()
        dist.destroy_process_group()


def take_a_step(rank: int, world_size: int) -> None:
    # A function of its own, so that the model is freed before the group: the other way round PyTorch can deadlock, freeing the group in
    # DistributedDataParallel's destructor while a thread of Gloo waits for the interpreter lock.
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.full((4, 3), float(rank))).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        gradients = [torch.empty_like(parameter) for _ in range(world_size)]
        dist.all_gather(gradients, parameter.grad)
        assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    expected_weight_gradient = 4 * (world_size - 1) / 2
    assert torch.allclose(model.module.weight.grad, torch.full((2, 3), expected_weight_gradient))


def meet_in_vain(store: RendezvousStore, rank: int, world_size: int) -> None:
    with pytest.raises(dist.DistStoreError, match=rf"rank {rank} waited 1\.0 s .* for what nobody set: 3/in vain/.*2$"):
        meet(store, rank, world_size, "in vain", timeout_s=1.0)


def meet_and_leave(store: RendezvousStore, rank: int, world_size: int) -> None:
    meet(store, rank, world_size, "and leave")
    dist.barrier()
    sys.exit(0)


def run_job(address: str, key: bytes, function: Callable[..., None], world_size: int, absent: int) -> bool:
    """Whether all its ranks end well; does not return in the ranks themselves."""
    children = []
    for rank in range(world_size - absent):
        child = os.fork()
        if not child:
            client = Client(address, key, name=f"rank {rank}", timeout_s=20.0)
            function(RendezvousStore(client, timeout_s=20.0), rank, world_size)
            os._exit(0)  # Python's own way out takes more than a second with PyTorch loaded
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)


def main(address: str, key_file: str, *jobs: str) -> None:
    import torch._dynamo  # noqa: F401  # DistributedDataParallel does so; here once for all ranks

    for job in jobs:
        function, world_size, *absent = job.split()
        if run_job(address, read_key(key_file), globals()[function], int(world_size), len(absent)):
            print(f"{job}: ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
