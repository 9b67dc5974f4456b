"""Activations that are computed again in backward (`torch.utils.checkpoint`) change no number, dropout included."""

import pytest
import torch
import torch.nn.functional as F
from test_gradients import TINY_BUCKETS, batch, micro, values
from torch import nn
from torch.utils.checkpoint import checkpoint

import hora
from hora.errors import ConfigError
from hora.testing import run_ranks
from hora.testing.reference import assert_same

WAYS = {"kept": None, "recomputed": False, "reentrant": True}
"""Of treating activations, with `use_reentrant` of those that compute them again."""


class Dropping(nn.Module):
    """Two parts with dropout, which must drop the same when it is computed again."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Dropout(0.4))
        self.second = nn.Sequential(nn.Linear(11, 5), nn.Dropout(0.4), nn.Tanh(), nn.Linear(5, 3))
        self.reentrant = WAYS[way]
        self.to(hora.device(), torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs.requires_grad_(True)  # else a reentrant part would have nothing to go back to
        for part in (self.first, self.second):
            hidden = part(hidden) if self.reentrant is None else checkpoint(part, hidden, use_reentrant=self.reentrant)
        return hidden


def loss_sum(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs), targets, reduction="sum")


def trained(way: str, loop: str, strategy: str) -> dict[str, torch.Tensor | None]:
    """Parameters after three updates; ranks drop differently."""
    model = Dropping(way)
    optimizer = hora.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), 0.05), model, strategy=strategy, bucket_cap_bytes=TINY_BUCKETS, clip_norm=1.0
    )
    torch.manual_seed(100 + hora.rank())

    def loss_fn(model, tensors, state):
        return loss_sum(model, *tensors), len(tensors[0]), {}, state

    train_step = hora.TrainStep(model, loss_fn, optimizer, capture=False) if loop == "train step" else None
    for seed in range(3):
        micro_batches = micro(batch(12, seed), 2)
        if train_step is not None:
            train_step(micro_batches)
        elif loop == "explicit":
            for tensors in optimizer.micro_batches(micro_batches):
                optimizer.backward(loss_sum(model, *tensors), weight=len(tensors[0]))
            optimizer.step()
        else:
            optimizer.zero_grad()
            (loss_sum(model, *(torch.cat(parts) for parts in zip(*micro_batches, strict=True))) / 12).backward()
            optimizer.step()
    return values(model)


@pytest.mark.parametrize("strategy", ["overlap", "deferred", "sharded"])
@run_ranks(1, 3)
def test_updates_are_those_of_kept_activations(strategy: str) -> None:
    for loop in ("explicit", "train step", "plain"):
        expected = trained("kept", loop, strategy)
        assert_same(trained("recomputed", loop, strategy), expected, 1e-9)
        if (loop, strategy) != ("plain", "sharded"):
            assert_same(trained("reentrant", loop, strategy), expected, 1e-9)


@run_ranks(1, 2)
def test_reentrant_parts_in_a_plain_loop_are_refused_where_their_sums_would_be_scattered() -> None:
    """Each part has a backward of its own inside the user's: the first one to end leaves each rank with its share of the sums."""
    with pytest.raises(ConfigError, match=r"with torch\.utils\.checkpoint pass use_reentrant=False"):
        trained("reentrant", "plain", "sharded")


def exact_values(way: str) -> str:
    model = Dropping(way)
    optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.05), model, bucket_cap_bytes=TINY_BUCKETS)
    dataset = torch.utils.data.TensorDataset(*(tensor.cpu() for tensor in batch(24)))
    for step in hora.DataLoader(dataset, global_batch_size=8, micro_batch_size=1, seed=2):
        for inputs, targets in optimizer.micro_batches(step):
            optimizer.backward(loss_sum(model, inputs.clone(), targets), weight=len(inputs))
        optimizer.step()
    return torch.cat([value.flatten() for value in values(model).values() if value is not None]).numpy().tobytes().hex()


def test_exact_mode_has_the_bits_of_kept_activations_on_any_number_of_ranks(rank_pools):
    found = {}
    for world_size in (1, 3):
        for way in WAYS:
            how = {"backend": None, "device": "cpu", "exact": True}
            outcomes = rank_pools.run(exact_values, {"way": way}, world_size=world_size, how=how, timeout_s=60.0)
            assert all(outcome.clean for outcome in outcomes), outcomes
            found[world_size, way] = outcomes[0].result
    assert len(set(found.values())) == 1, found
