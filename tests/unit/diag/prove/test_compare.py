import math

import numpy as np
import pytest
from made_up_records import facts, run, step, tensors

from hora.diag.prove.compare import between_ranks, changed_hyperparameters, compare_runs, differing
from hora.diag.prove.records import TensorFacts


def test_runs_with_the_same_records_have_the_same_bits() -> None:
    one = run([step(1, samples=[1, 2]), step(2, samples=[3, 4])])
    two = run([step(1, samples=[1]), step(2, samples=[3])], [step(1, 1, samples=[2]), step(2, 1, samples=[4])])
    assert all(compared.same_bits for compared in compare_runs(one, two))


def test_stages_come_in_the_order_of_a_step() -> None:
    one = run([step(1, samples=[1])])
    two = run([step(1, samples=[9], gradient=tensors(101, off=1.0), parameter=tensors(1, off=1.0), group={"lr": 0.2})])
    (_, compared) = compare_runs(one, two)
    assert list(compared.stages) == ["samples", "gradients", "hyperparameters", "parameters"]
    assert compared.first is not None
    assert compared.first.stage == "samples"


@pytest.mark.parametrize(
    ("dtype", "off", "beyond"), [("float32", 1e-6, False), ("float32", 1e-2, True), ("float64", 1e-6, True), ("bfloat16", 1e-2, False)]
)
def test_rounding_depends_on_the_precision(dtype: str, off: float, beyond: bool) -> None:
    one = run([step(1, gradient=tensors(101, dtype=dtype))])
    two = run([step(1, gradient=tensors(101, off=off, dtype=dtype))])
    (_, compared) = compare_runs(one, two)
    assert not compared.same_bits
    assert (compared.first is not None) == beyond


def test_sizes_are_relative_to_the_tensor_but_not_to_one_that_should_be_zero() -> None:
    before = {"large": facts([1000.0, 0.0]), "zero": facts([1e-9, 0.0])}
    after = {"large": facts([1000.0, 1.0]), "zero": facts([-1e-9, 0.0])}
    sizes = {each.name: each.size for each in differing(before, after)}
    assert sizes["large"] == pytest.approx(1e-3)
    assert sizes["zero"] < 1e-8


def test_missing_gradient_counts_as_zero() -> None:
    assert differing({"a": facts([0.0, 0.0])}, {}) == ()
    assert differing({"a": facts([3.0])}, {})[0].size == pytest.approx(1.0)


def test_what_is_not_finite_or_of_another_shape_is_beyond_any_rounding() -> None:
    assert differing({"a": facts([1.0])}, {"a": facts([math.nan])})[0].size == math.inf
    assert differing({"a": facts([1.0])}, {"a": facts([1.0, 2.0])})[0].size == math.inf


def test_negative_zero_is_not_the_same_bits() -> None:
    assert differing({"a": facts([0.0])}, {"a": facts([-0.0])})[0].size == 0.0


def test_ranks_are_compared_with_one_another_in_what_they_have() -> None:
    apart = between_ranks([step(1), step(1, 1, gradient=tensors(101, off=0.5))], "gradient")
    assert [each.name for each in apart] == ["layer.weight"]
    shard = {name: tensor for name, tensor in tensors(1).items() if name == "layer.bias"}
    assert between_ranks([step(1), step(1, 1, parameter=shard)], "parameter") == ()


def test_parameters_must_be_the_same_on_all_ranks() -> None:
    (_, compared) = compare_runs(run([step(1)]), run([step(1)], [step(1, 1, parameter=tensors(1, off=1.0))]))
    assert list(compared.stages) == ["parameters"]
    assert compared.first is not None


def test_gradient_that_one_rank_lacks_is_a_difference_if_it_updates_the_parameter() -> None:
    less = {name: tensor for name, tensor in tensors(101).items() if name == "layer.bias"}
    assert [each.name for each in between_ranks([step(1), step(1, 1, gradient=less)], "gradient")] == ["layer.weight"]
    assert between_ranks([step(1), step(1, 1, gradient=less, parameter=less)], "gradient") == ()


def test_hyperparameters_are_compared_by_value() -> None:
    changed = changed_hyperparameters(
        step(1, group={"betas": [0.9, 0.99], "initial_lr": 1.0}), step(1, group={"betas": [0.9, 0.95], "initial_lr": 2.0})
    )
    assert changed == {"betas": ([0.9, 0.99], [0.9, 0.95])}
    assert changed_hyperparameters(step(1, group={"lr": 0.3}), step(1, group={"lr": 0.1 + 0.2})) == {}


def test_optimizer_state_is_measured_against_its_own_kind() -> None:
    state = {"exp_avg of a": facts([1.0]), "exp_avg_sq of a": facts([1e-8])}
    other = {"exp_avg of a": facts([1.0]), "exp_avg_sq of a": facts([2e-8])}
    assert differing(state, other)[0].size == pytest.approx(1.0)
    assert isinstance(state["exp_avg of a"], TensorFacts)
    assert np.isfinite(state["exp_avg of a"].sketch).all()
