"""Each cause from made-up records, and what is close to it but is not."""

import dataclasses

import pytest
from made_up_records import call, causes, codes, facts, run, step, tensors

from hora.diag.prove.causes import Case, uneven_steps
from hora.diag.prove.records import END, Run, StepRecord


def two(*, second: dict | None = None, **both) -> Run:
    """A run on two ranks of one step; samples 1, 2 on one rank and 3, 4 on the other."""
    first = {"samples": [1, 2]} | both
    return run([step(1, 0, **first)], [step(1, 1, **({"samples": [3, 4]} | both | (second or {})))])


ONE = run([step(1, samples=[1, 2, 3, 4])])


def test_runs_that_agree_have_no_cause() -> None:
    assert codes(ONE, two()) == []


def test_global_batch_that_grows_is_said_first_and_kindly() -> None:
    grown = run([step(1, samples=[1, 2, 3, 4], group={"lr": 0.2})], [step(1, 1, samples=[5, 6, 7, 8], group={"lr": 0.2})])
    (finding,) = causes(ONE, grown)
    assert finding.code == "global-batch-grows"
    assert "takes 8 samples, with 1 rank 4" in finding.seen
    assert "no error" in finding.seen
    assert "linear scaling rule" in finding.seen
    assert "{4/ranks}" in finding.advice


def test_order_of_runs_does_not_matter() -> None:
    grown = run([step(1, samples=[1, 2, 3, 4])], [step(1, 1, samples=[5, 6, 7, 8])])
    assert codes(grown, ONE) == codes(ONE, grown) == ["global-batch-grows"]


def test_same_samples_on_all_ranks() -> None:
    assert codes(ONE, two(second={"samples": [1, 2]})) == ["same-samples-on-all-ranks"]
    assert codes(run([step(1, samples=[1, 2])]), two(second={"samples": [1, 2]})) == ["same-samples-on-all-ranks"]


def test_other_samples() -> None:
    (finding,) = causes(ONE, two(second={"samples": [3, 9]}))
    assert finding.code == "samples-differ"
    assert "of which 3 are the same" in finding.seen


def test_padding_is_what_has_come_before() -> None:
    one = run([step(1, samples=[1, 2, 3, 4]), step(2, samples=[5])])
    padded = run([step(1, samples=[1, 3]), step(2, samples=[5])], [step(1, 1, samples=[2, 4]), step(2, 1, samples=[1])])
    other = run([step(1, samples=[1, 3]), step(2, samples=[5])], [step(1, 1, samples=[2, 4]), step(2, 1, samples=[9])])
    assert [(finding.code, finding.step) for finding in causes(one, padded)] == [("padded-with-duplicates", 2)]
    assert codes(one, other) == ["samples-differ"]


def evaluation(one: list[int], *ranks: list[int]) -> list[str]:
    def end(rank: int, samples: list[int]) -> StepRecord:
        return StepRecord(rank, 1, END, evaluation=(call(samples),) if samples else ())

    reference = dataclasses.replace(ONE, ends={0: end(0, one)})
    return codes(reference, dataclasses.replace(two(), ends={rank: end(rank, samples) for rank, samples in enumerate(ranks)}))


def test_evaluation() -> None:
    assert evaluation([7, 8, 9], [7, 8], [9]) == []
    assert evaluation([7, 8, 9], [7, 8], [9, 7]) == ["evaluation-duplicates"]
    assert evaluation([7, 8, 9], [7], [8]) == ["samples-differ"]


def test_evaluation_that_goes_with_training_is_not_compared_where_training_has_other_samples() -> None:
    one = run([step(1, samples=[1, 2], evaluated=[1, 2]), step(2, samples=[3, 4], evaluated=[3, 4])])
    grown = [[step(1, rank, samples=[1 + 2 * rank, 2 + 2 * rank], evaluated=[1 + 2 * rank, 2 + 2 * rank])] for rank in range(2)]
    for rank, records in enumerate(grown):
        records.append(step(2, rank, samples=[5 + 2 * rank, 6 + 2 * rank], evaluated=[5 + 2 * rank, 6 + 2 * rank]))
    assert codes(one, run(*grown)) == ["global-batch-grows"]


def test_evaluation_of_everything_on_every_rank_or_on_one_is_harmless() -> None:
    assert evaluation([7, 8, 9], [7, 8, 9], [9, 8, 7]) == []
    assert evaluation([7, 8, 9], [7, 8, 9], []) == []


def test_forgotten_epoch() -> None:
    assert codes(ONE, two(repeated_epoch=0)) == ["set-epoch-forgotten"]
    assert codes(ONE, two(repeated_epoch=None)) == []


def ended(*, failed: bool = False) -> StepRecord:
    return StepRecord(0, 2, END, notes={"failed": failed})


def test_uneven_steps_of_ranks_that_came_to_their_end() -> None:
    more = run([step(1), step(2)], [step(1, 1)], ends={0: ended(), 1: ended()})
    (finding,) = uneven_steps(more)
    assert "rank 1 was through after 1 steps, while rank 0 went on" in finding.seen
    assert list(uneven_steps(run([step(1)], [step(1, 1)], ends={0: ended(), 1: ended()}))) == []


def test_rank_that_waits_for_one_that_is_through_has_uneven_steps() -> None:
    def found(begun: int, ends: dict[int, StepRecord]) -> list[str]:
        waits = dataclasses.replace(run([step(1)], [step(1, 1)], ends=ends), begun={0: 1, 1: begun})
        return [finding.code for finding in uneven_steps(waits)]

    assert found(2, {0: ended()}) == found(2, {0: ended(), 1: ended(failed=True)}) == ["uneven-steps"]
    assert found(1, {0: ended()}) == []  # it may evaluate, or have failed there
    assert found(2, {0: ended(failed=True)}) == found(2, {}) == []


def test_initialisation() -> None:
    apart = run([step(0), step(1)], [step(0, 1, parameter=tensors(0, off=1.0)), step(1, 1)])
    together = run([step(0, parameter=tensors(9)), step(1)], [step(0, 1, parameter=tensors(9)), step(1, 1)])
    assert codes(run([step(1)]), apart) == ["initialisation-differs-between-ranks"]
    assert codes(run([step(1)]), together) == ["initialisation-differs"]


def test_gradients_of_ranks() -> None:
    other = {"gradient": tensors(5)}
    assert codes(ONE, two(second=other)) == ["gradients-not-synchronised"]
    assert codes(ONE, two(second=other, bypassed=True)) == ["wrapper-bypassed"]
    (finding,) = causes(ONE, two(second={"gradient": tensors(101, off=1.0)}))
    assert finding.code == "parameter-not-synchronised"
    assert "layer.weight" in finding.seen


def test_ranks_that_differ_by_rounding_are_synchronised() -> None:
    assert codes(ONE, two(second={"gradient": tensors(101, off=1e-6)})) == []


@pytest.mark.parametrize(("factor", "said"), [(2.0, "summed over the ranks"), (0.5, "once too often"), (3.7, "3.7 times")])
def test_common_factor(factor: float, said: str) -> None:
    (finding,) = causes(ONE, two(gradient=tensors(101, scale=factor)))
    assert finding.code == "gradients-off-by-factor"
    assert said in finding.seen


def test_gradients_with_no_common_factor_are_not_explained() -> None:
    mixed = tensors(101, scale=2.0) | {"layer.bias": tensors(101)["layer.bias"]}
    assert codes(ONE, two(gradient=mixed)) == []
    assert codes(ONE, two(gradient=tensors(101, scale=1.00001))) == []


def unequal(losses: list[tuple[float, int | None]], reference: float) -> list[str]:
    one = run([step(1, samples=[1, 2, 3, 4], losses=[(reference, 4)])])
    first, second = losses
    other = {"gradient": tensors(101, off=0.1)}
    return codes(one, run([step(1, samples=[1], losses=[first], **other)], [step(1, 1, samples=[2, 3, 4], losses=[second], **other)]))


def test_mean_of_means_needs_unequal_parts_and_the_weighted_mean() -> None:
    assert unequal([(4.0, 1), (2.0, 3)], 2.5) == ["mean-of-means"]
    assert unequal([(4.0, None), (2.0, None)], 2.5) == ["mean-of-means"]  # by rows, where the loss does not tell
    assert unequal([(4.0, 1), (2.0, 3)], 3.0) == []  # the reference is the plain mean
    assert unequal([(4.0, 2), (1.0, 2)], 2.5) == []  # equal parts
    assert unequal([(2.5, 1), (2.5, 3)], 2.5) == []  # both means are the same


def scaled(lr: float, *, samples: tuple[list[int], list[int]], **more) -> list[str]:
    first, second = samples
    group = {"lr": lr} | more
    return codes(ONE, run([step(1, samples=first, group=group)], [step(1, 1, samples=second, group=group)]))


FIXED, GROWN = ([1, 2], [3, 4]), ([1, 2, 3, 4], [5, 6, 7, 8])


def test_learning_rate_is_held_against_the_growth_of_the_batch() -> None:
    assert scaled(0.2, samples=FIXED) == ["learning-rate-scaled"]
    assert scaled(0.15, samples=FIXED) == ["hyperparameter-differs"]
    assert scaled(0.1, samples=GROWN) == scaled(0.2, samples=GROWN) == scaled(0.1 * 2**0.5, samples=GROWN) == ["global-batch-grows"]
    assert scaled(0.4, samples=GROWN) == ["global-batch-grows", "learning-rate-scaled"]
    assert scaled(0.3, samples=GROWN) == ["global-batch-grows", "hyperparameter-differs"]


def test_hyperparameters() -> None:
    assert scaled(0.1, samples=FIXED, weight_decay=0.1) == ["hyperparameter-differs"]
    assert scaled(0.2, samples=FIXED, momentum=0.9) == ["learning-rate-scaled", "hyperparameter-differs"]


def test_hyperparameters_of_ranks() -> None:
    (finding,) = causes(ONE, two(second={"group": {"lr": 0.3}}))
    assert finding.code == "hyperparameter-differs"
    assert "lr is 0.3 on rank 1 and 0.1 on rank 0" in finding.seen


def test_buffers_of_ranks() -> None:
    other = {"second": {"buffer": {"norm.running_mean": facts([2.0])}}, "buffer": {"norm.running_mean": facts([1.0])}}
    one = run([step(1, samples=[1, 2, 3, 4], buffer={"norm.running_mean": facts([1.0])})])
    assert codes(one, two(**other)) == ["buffers-not-synchronised"]
    assert codes(one, two(**other, batch_norms=["norm"])) == []


def test_rounding_in_float64_may_grow_but_not_leap() -> None:
    def off(*sizes: float) -> Run:
        return run([step(number, gradient=tensors(100 + number, off=size, dtype="float64")) for number, size in enumerate(sizes, 1)])

    def first(*sizes: float) -> int | None:
        found = Case.of(off(*(0.0 for _ in sizes)), off(*sizes)).first
        return None if found is None else found.step

    assert first(1e-9, 1e-8, 1e-6, 1e-4) is None
    assert first(1e-14, 1e-13, 1e-4) == 3
    assert first(1e-3) == 1
