from hora.plan.buckets import ParameterFacts, assign_buckets, default_cap_bytes, digest, order_in_parts


def facts(*sizes: int, kind: str = "float32 cpu", sparse: bool = False) -> list[ParameterFacts]:
    return [ParameterFacts(f"p{i}", (size,), kind, 4, sparse) for i, size in enumerate(sizes)]


def test_the_last_registered_come_first_and_the_first_bucket_is_small() -> None:
    assert assign_buckets(facts(10, 10, 10, 10, 10), cap_bytes=80, first_cap_bytes=40) == [(4,), (3, 2), (1, 0)]


def test_a_parameter_beyond_the_cap_has_a_bucket_of_its_own() -> None:
    assert assign_buckets(facts(1, 1000, 1), cap_bytes=80, first_cap_bytes=4) == [(2,), (1,), (0,)]


def test_no_other_parameter_waits_for_one_beyond_the_cap() -> None:
    assert assign_buckets(facts(1000, 1, 1, 1), cap_bytes=80, first_cap_bytes=4) == [(3,), (2, 1), (0,)]


def test_in_a_bucket_odd_sizes_come_last_so_that_others_begin_at_multiples_of_16_bytes() -> None:
    assert assign_buckets(facts(8, 3, 4, 10, 0, 10), cap_bytes=100, first_cap_bytes=40) == [(5,), (4, 2, 0, 3, 1)]
    halves = [ParameterFacts("p", (size,), "bfloat16 cuda", 2) for size in (16, 8, 4)]
    assert assign_buckets(halves, cap_bytes=1000, first_cap_bytes=1000) == [(1, 0, 2)]


def test_of_gradients_that_come_together_the_largest_bucket_leaves_first() -> None:
    parameters = facts(90, 10, 20, 30, 5)
    buckets = [(4,), (3,), (2, 1), (0,)]
    assert order_in_parts(parameters, buckets, part_bytes=1000) == [3, 1, 2, 0]
    assert order_in_parts(parameters, buckets, part_bytes=4 * 40) == [1, 0, 3, 2], "the parts are 4, 3, 2 of 220 bytes, then 1, 0"
    assert order_in_parts(parameters, buckets, part_bytes=1) == [0, 1, 2, 3]


def test_kinds_are_not_mixed_and_sparse_parameters_are_in_no_bucket() -> None:
    mixed = [*facts(1), *facts(1, kind="float64 cpu"), *facts(1, sparse=True), *facts(1)]
    buckets = assign_buckets(mixed, cap_bytes=1000, first_cap_bytes=1000)
    assert sorted(sorted(members) for members in buckets) == [[0, 3], [1]]


def test_every_dense_parameter_is_in_exactly_one_bucket() -> None:
    for cap in (1, 7, 64, 10**9):
        members = [index for bucket in assign_buckets(facts(*range(20)), cap, first_cap_bytes=16) for index in bucket]
        assert sorted(members) == list(range(20))


def test_the_digest_tells_names_shapes_kinds_and_buckets_apart() -> None:
    base = facts(2, 3)
    others = [
        facts(2, 4),
        facts(2, 3, kind="float64 cpu"),
        facts(2, 3, sparse=True),
        [*base[:1], ParameterFacts("q", (3,), "float32 cpu", 4)],
    ]
    digests = {digest(parameters, [(1,), (0,)]) for parameters in [base, *others]} | {digest(base, [(1, 0)])}
    assert len(digests) == 6
    assert digest(base, [(1,), (0,)]) == digest(facts(2, 3), [(1,), (0,)])


def test_by_default_a_bucket_is_a_third_of_all_on_gpus_within_bounds() -> None:
    mib = 2**20

    def cap(size_mib: int, kind: str) -> int:
        return default_cap_bytes([*facts(size_mib * mib // 4, kind=kind), *facts(mib, kind=kind, sparse=True)])

    assert [cap(size, "float32 cuda") for size in (1, 74, 150, 299, 5000)] == [25 * mib, 25 * mib, 50 * mib, 299 * mib // 3, 100 * mib]
    assert cap(5000, "float32 cpu") == 25 * mib
