"""What stands in where a private call of torch is missing gives the same gradients."""

from unittest.mock import patch

import torch
from test_gradients import TINY_BUCKETS, batch, gradients, loss_sum, mlp, values
from torch import nn

import hora
from hora.sync import synchronizer
from hora.sync.gradients import copy_all
from hora.testing import run_ranks
from hora.testing.reference import assert_same


def two_plain_steps(model: nn.Module, accumulation_steps: int) -> None:
    optimizer = hora.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, accumulation_steps=accumulation_steps, bucket_cap_bytes=TINY_BUCKETS
    )
    for step in range(2):
        optimizer.zero_grad()
        for k in range(accumulation_steps):
            loss_sum(model, *batch(3, 100 * hora.rank() + 10 * step + k)).backward()
        optimizer.step()


@run_ranks(1, 2, 3)
def test_step_sums_what_the_engine_could_not_announce() -> None:
    for accumulation_steps in (1, 2):
        model, twin = mlp(), mlp()
        two_plain_steps(model, accumulation_steps)
        with patch.object(synchronizer, "at_end_of_backward", lambda _: False):
            two_plain_steps(twin, accumulation_steps)
        assert_same(values(twin), values(model), 0.0)
        assert_same(gradients(twin), gradients(model), 0.0)


def test_copying_one_by_one_is_copying_at_once() -> None:
    sources = [torch.randn(3), torch.randn(2, 2).t(), torch.empty(0)]
    at_once, one_by_one = ([torch.zeros(source.shape) for source in sources] for _ in range(2))
    copy_all(at_once, sources)
    with patch.object(torch, "_foreach_copy_", None):
        copy_all(one_by_one, sources)
    for source, first, second in zip(sources, at_once, one_by_one, strict=True):
        assert torch.equal(source, first)
        assert torch.equal(source, second)
