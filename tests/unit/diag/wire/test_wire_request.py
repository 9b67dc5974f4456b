import pytest
from hypothesis import given
from hypothesis import strategies as st

from hora.diag.wire.request import Asked, Place, Request, parse_size, resolve, say_size, sizes_between
from hora.errors import ConfigError

CPU = Place(num_gpus=0)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1K", 1024), ("64k", 65536), ("4M", 4 << 20), ("1G", 1 << 30), ("16 MiB", 16 << 20), ("2KB", 2048), (" 8B ", 8)],
)
def test_sizes_have_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-4", "3", "6", "1T", "1.5K", "K", "1e3", "4 4", "٤K", "9" * 30])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(
        ConfigError, match="a size must be a number of bytes such as 4096, 64K, 4M or 1G, a multiple of 4 and at most 16 GiB, but is"
    ):
        parse_size(text)


@given(st.integers(1, 1 << 32).map(lambda number: 4 * number))
def test_a_size_is_said_as_it_is_read(size):
    assert parse_size(say_size(size)) == size


def test_sizes_grow_by_four():
    assert sizes_between(1024, 20_000) == (1024, 4096, 16384)
    assert sizes_between(1024, 1024) == (1024,)


def test_without_words_sizes_and_backends_are_those_of_the_device():
    on_cpu, on_gpus = resolve(Asked(), CPU), resolve(Asked(), Place(num_gpus=4))
    assert (on_cpu.sizes[0], on_cpu.sizes[-1], on_cpu.backends, on_cpu.ranks) == (1024, 64 << 20, ("shm", "gloo"), (2,))
    assert (on_gpus.sizes[0], on_gpus.sizes[-1], on_gpus.backends, on_gpus.ranks) == (1024, 1 << 30, ("nccl",), (4,))
    assert on_cpu.algorithms == ("native", "ring", "recursive_doubling", "ordered")
    assert on_gpus.algorithms == (*on_cpu.algorithms, "symmetric")


def test_in_a_job_of_several_nodes_all_its_ranks_are_measured_by_node_too():
    request = resolve(Asked(), Place(num_gpus=0, num_nodes=2, world_size=6))
    assert (request.backends, request.ranks, request.algorithms[-1]) == (("gloo",), (6,), "hierarchical")
    assert request.variants(4, "cpu", 6)[-1] == ("gloo", "ordered", False)
    assert request.variants(6, "cpu", 6)[-1] == ("gloo", "hierarchical", False)


def test_words_are_sorted_and_taken_once():
    request = resolve(Asked(sizes="4K,1K,4K", ranks="4,2,2", backends="gloo,shm,gloo", algorithms="ring,native"), CPU)
    assert (request.sizes, request.ranks, request.backends, request.algorithms) == (
        (1024, 4096),
        (2, 4),
        ("gloo", "shm"),
        ("ring", "native"),
    )
    assert request.points == [(1024, 2, "cpu"), (1024, 4, "cpu"), (4096, 2, "cpu"), (4096, 4, "cpu")]


def test_backends_of_one_device_stand_side_by_side():
    request = resolve(Asked(sizes="1K", ranks="2", backends="shm,nccl,gloo", algorithms="native"), Place(num_gpus=2))
    assert request.points == [(1024, 2, "cpu"), (1024, 2, "cuda")]
    assert request.variants(2, "cpu", 2) == [("shm", "native", False), ("gloo", "native", False)]


def test_in_graphs_the_variants_of_gpus_are_measured_once_more():
    request = resolve(Asked(backends="nccl,gloo", algorithms="native,symmetric", graphs=True), Place(num_gpus=2))
    assert request.variants(2, "cuda", 2) == [("nccl", name, in_graph) for in_graph in (False, True) for name in ("native", "symmetric")]
    assert request.variants(2, "cpu", 2) == [("gloo", "native", False)]


@pytest.mark.parametrize("asked", [Asked(graphs=True), Asked(algorithms="symmetric")])
def test_what_only_gpus_can_do_is_refused_on_cpus(asked):
    with pytest.raises(ConfigError, match="none of the backends takes tensors of one"):
        resolve(asked, CPU)


def test_a_request_survives_its_way_to_the_ranks():
    request = resolve(Asked(), CPU)
    assert Request.parse(request.dump()) == request


@pytest.mark.parametrize(
    ("asked", "place", "problem"),
    [
        (Asked(backends="shm,mpi"), CPU, 'unknown backend "mpi"; choose from: shm, gloo, nccl'),
        (Asked(algorithms="tree"), CPU, 'unknown algorithm "tree"; choose from: native, ring, .*auto'),
        (Asked(backends="nccl"), CPU, "backend nccl needs a GPU, but this machine shows none; choose from: shm, gloo"),
        (Asked(algorithms="hierarchical"), CPU, "algorithm hierarchical needs several nodes: .* on one choose from: native, ring"),
        (Asked(backends="shm"), Place(0, 2, 4), "serves the ranks of one host, but these are on 2 nodes"),
        (Asked(sizes="1K", begin="1K"), CPU, "give either --sizes, or --from and --to"),
        (Asked(begin="4K", end="1K"), CPU, "4 KiB is larger than 1 KiB"),
        (Asked(sizes="1K,,4K"), CPU, "a size must be .* but is ''"),
        (Asked(ranks="1,2"), CPU, "--ranks must be numbers from 2 on"),
        (Asked(ranks="two"), CPU, "--ranks must be numbers from 2 on, .* but is 'two'"),
        (Asked(ranks="8"), Place(0, 1, 4), "--ranks must not be larger than the job, which has 4 ranks"),
        (Asked(ranks="2,4"), Place(2), "each rank needs a GPU of its own, but 4 ranks are asked for and 2 GPUs are here"),
        (Asked(), Place(1), "--ranks must be numbers from 2 on"),
    ],
)
def test_mistakes_are_refused_with_the_choices(asked, place, problem):
    with pytest.raises(ConfigError, match=problem):
        resolve(asked, place)
