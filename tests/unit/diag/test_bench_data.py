import pytest

from hora.diag.bench import data
from hora.diag.bench.registry import workloads_of
from hora.errors import HoraError


@pytest.mark.parametrize("variant", data._SHUFFLES)
@pytest.mark.parametrize("fraction", [0.0, 0.9])
def test_shuffles_are_measured_in_a_process_of_their_own(variant: str, fraction: float) -> None:
    source, _num_samples = data._SHUFFLES[variant]
    elapsed_ms, peak_mib = data.shuffle(source, 10_000, fraction)
    assert elapsed_ms > 0
    assert (peak_mib < 100) == variant.startswith("hora"), "Hora's plan must not load torch"


def test_a_shuffle_that_fails_says_why() -> None:
    with pytest.raises(HoraError, match="measuring 100 samples ended with exit code 1: (?s:.*)AssertionError"):
        data.shuffle(data._SHUFFLES["hora, 1e8 samples"][0], 100, 0.0)


def test_loaders_are_measured_over_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    for workload in workloads_of("data"):
        if workload.name.startswith("data.load"):
            assert list(workload.variants) == ["torch DataLoader", "hora.DataLoader"]
            assert all(sample() > 0 for sample in workload.variants.values())


def test_an_index_is_measured() -> None:
    assert data.nanoseconds_per_index(10**10) > 0
