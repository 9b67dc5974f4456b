from hora.plan.seeds import derive_key, seed_at


def test_seeds_are_the_published_splitmix64() -> None:
    """Values of the reference implementation for the state 1234567 (S. Vigna, splitmix64.c)."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [seed_at(1234567, position) for position in range(5)] == expected


def test_seeds_of_positions_epochs_and_purposes_differ() -> None:
    keys = [derive_key(purpose, seed, epoch) for purpose in ("samples", "stream") for seed in range(5) for epoch in range(20)]
    seeds = {seed_at(key, position) for key in keys for position in range(-50, 50)}
    assert len(seeds) == 2 * 5 * 20 * 100
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_keys_do_not_run_together() -> None:
    assert derive_key("samples", 1, 23) != derive_key("samples", 12, 3)


def test_keys_stay_the_same() -> None:
    """A resumed run must draw what the first one drew."""
    assert derive_key("samples", 0, 0) == 9645741900085523288
