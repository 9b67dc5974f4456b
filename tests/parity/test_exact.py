"""Exact mode: the same bits on 1, 2, 3 and 4 ranks."""

import hashlib
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hora


class Augmented(torch.utils.data.Dataset):
    """Samples with noise drawn from the global generators, as augmentation does."""

    def __init__(self, num_samples: int, shape: tuple[int, ...]):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(num_samples, *shape, generator=generator)
        self.targets = torch.randint(3, (num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int):
        return self.inputs[index] + 0.1 * torch.randn(self.inputs[index].shape) * random.random(), self.targets[index]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 33), nn.Dropout(0.3), nn.ReLU(), nn.Linear(33, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(5, 4, 2), nn.BatchNorm2d(4, momentum=None), nn.Flatten(),
        nn.Linear(36, 3),
    )  # fmt: skip


MODELS = {"perceptron": (perceptron, (6,)), "convolutional": (convolutional, (2, 6, 6))}


def digest(tensors) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def train(kind: str, *, strategy: str = "overlap", steps: int = 12, micro_batch_size: int | None = 2, bucket_cap_bytes: int = 300, state=None):
    """Digests after each step, and the state at the end."""
    make, shape = MODELS[kind]
    torch.manual_seed(hora.rank())  # ranks begin differently, as sloppy scripts do: rank 0's weights count
    if hora.rank() == 0:
        torch.manual_seed(11)
    model = make()
    optimizer = hora.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), 1e-2), model, strategy=strategy, bucket_cap_bytes=bucket_cap_bytes, clip_norm=1.0
    )
    loader = hora.DataLoader(Augmented(90, shape), global_batch_size=22, micro_batch_size=micro_batch_size, seed=5)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    digests = []
    while len(digests) < steps:
        for step in loader:
            for inputs, targets in optimizer.micro_batches(step):
                loss = F.cross_entropy(model(inputs), targets, reduction="sum")
                optimizer.backward(loss, weight=0.1 * len(targets))
            optimizer.step()
            gradients = [parameter.grad for parameter in model.parameters()]
            moments = [value for entry in optimizer.state.values() for value in entry.values()]
            digests.append(digest([*model.state_dict().values(), *gradients, *moments, optimizer.last_grad_norm]))
            if len(digests) == steps:
                break
    return digests, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}


def body(kind: str, **how):
    digests, _ = train(kind, **how)
    everybody = hora.all_gather_object(digests)
    assert all(other == digests for other in everybody), "ranks differ"
    return digests


HOW = {"backend": None, "device": "cpu", "exact": True}


def bits(rank_pools, world_size: int, **arguments) -> list[str]:
    """What the body returns on `world_size` ranks in exact mode."""
    outcomes = rank_pools.run(body, arguments, world_size=world_size, how=HOW, timeout_s=60.0)
    assert all(outcome.clean for outcome in outcomes), outcomes
    return outcomes[0].result


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_any_number_of_ranks_gives_the_same_bits(rank_pools, kind, micro_batch_size):
    alone = bits(rank_pools, 1, kind=kind, micro_batch_size=micro_batch_size)
    assert len(set(alone)) == len(alone)
    for world_size in (2, 3, 4):
        assert bits(rank_pools, world_size, kind=kind, micro_batch_size=micro_batch_size) == alone, world_size


@pytest.mark.parametrize("kind", MODELS)
def test_strategies_and_buckets_do_not_change_the_bits(rank_pools, kind):
    expected = bits(rank_pools, 3, kind=kind, strategy="deferred", bucket_cap_bytes=2**20)
    assert bits(rank_pools, 3, kind=kind, strategy="overlap", bucket_cap_bytes=100) == expected
