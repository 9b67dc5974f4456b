import numpy as np
import pytest
import torch

from hora.diag.prove.sketch import BUCKETS, sketch


def test_small_tensors_are_kept_exactly() -> None:
    tensor = torch.randn(5, 7)
    assert np.array_equal(sketch(tensor), tensor.double().flatten().numpy())
    assert sketch(torch.tensor(True)).tolist() == [1.0]
    assert sketch(torch.empty(0)).shape == (0,)


def test_sketches_are_linear() -> None:
    a, b = torch.randn(1000, 77, dtype=torch.float64), torch.randn(1000, 77, dtype=torch.float64)
    assert np.allclose(sketch(a - 3 * b), sketch(a) - 3 * sketch(b), atol=1e-9)


@pytest.mark.parametrize("numel", [257, 1000, 65536, 65537, 200_001])
def test_norms_are_estimated(numel: int) -> None:
    for seed in range(5):
        tensor = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        assert sketch(tensor).shape == (BUCKETS,)
        assert np.linalg.norm(sketch(tensor)) == pytest.approx(tensor.norm().item(), rel=0.25)


def test_one_element_among_many_is_seen() -> None:
    tensor = torch.zeros(300_000)
    tensor[270_001] = 2.5
    assert np.linalg.norm(sketch(tensor)) == pytest.approx(2.5)


def test_signs_do_not_cancel_what_is_alike() -> None:
    """Without signs a tensor whose halves are opposite would vanish."""
    half = torch.randn(2**16)
    assert np.linalg.norm(sketch(torch.cat([half, -half]))) > 100


def test_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    sketch(torch.arange(70_000.0))
    assert torch.equal(before, torch.get_rng_state())
