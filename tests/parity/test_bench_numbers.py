"""What `hora bench step` compares variants by: right ones are right, and those that leave work out are seen."""

import pytest
import torch

from hora.diag.steps import variants, workloads
from hora.diag.steps.numbers import Expected, tolerance
from hora.diag.steps.request import WORKLOADS
from hora.testing import run_ranks

VARIANTS = ("single", "per-parameter", "fused", "ddp", "deferred", "overlap", "sharded", "fsdp2")


@pytest.mark.parametrize("name", ["lstm_small_adamw", "transformer_nmt"])
@run_ranks(2)
def test_variants_do_the_same_work_and_those_that_do_not_are_seen(name):
    job = workloads.make(name, tiny=True)
    expected = Expected(job)
    for variant in VARIANTS:
        way = variants.make(variant, job)
        way.step()
        assert expected.difference(variant, way) <= tolerance(job), variant
    alone = variants.make("single", job)
    assert expected.difference("ddp", alone) > tolerance(job)
    alone.step = lambda: None
    assert expected.difference("single", alone) == 1.0


@pytest.mark.parametrize("name", WORKLOADS)
def test_batches_of_all_ranks_have_as_many_targets(name):
    job = workloads.make(name, tiny=True)
    first, second = (job.batch_of(rank, torch.device("cpu")) for rank in (0, 1))
    assert job.weight(first) == job.weight(second) > 0
    assert not torch.equal(first[-1], second[-1])
    assert torch.equal(job.batch_of(0, torch.device("cpu"))[-1], first[-1])


def test_a_translation_batch_has_4096_targets_and_hides_padding():
    job = workloads.make("transformer_nmt", tiny=False)
    source, begun, target = job.batch_of(0, torch.device("cpu"))
    assert job.weight((source, begun, target)) == 4096
    assert torch.equal(begun[:, 1:], target[:, :-1] * (target[:, 1:] != 0))
    small = workloads.make("transformer_nmt", tiny=True)
    model, (source, begun, _) = small.model(), small.batch_of(0, torch.device("cpu"))
    assert (source[0] != 0).tolist() == [True] * 3 + [False] * 6
    torch.testing.assert_close(model(source, begun)[0], model(source[:1, :3], begun[:1])[0])
