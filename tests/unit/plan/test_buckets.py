from hora.plan.buckets import ParameterFacts, assign_buckets, digest


def facts(*sizes: int, kind: str = "float32 cpu", sparse: bool = False) -> list[ParameterFacts]:
    return [ParameterFacts(f"p{i}", (size,), kind, 4, sparse) for i, size in enumerate(sizes)]


def test_the_last_registered_come_first_and_the_first_bucket_is_small() -> None:
    assert assign_buckets(facts(10, 10, 10, 10, 10), cap_bytes=80, first_cap_bytes=40) == [(4,), (3, 2), (1, 0)]


def test_a_parameter_beyond_the_cap_has_a_bucket_of_its_own() -> None:
    assert assign_buckets(facts(1, 1000, 1), cap_bytes=80, first_cap_bytes=4) == [(2,), (1,), (0,)]


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
