"""Exact mode on GPUs: the same bits on as many of 1, 2, 3 and 4 as there are."""

import pytest
import test_exact
import test_exact_lm
import torch
import torch.nn.functional as F
from gpu_ranks import WORLD_SIZES
from test_exact_lm import texts as texts
from test_lm_resume import assert_same_run
from torch import nn

import hora

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", test_exact.MODELS)
@pytest.mark.parametrize("strategy", ["overlap", "deferred"])
def test_any_number_of_gpus_gives_the_same_bits(rank_pools, kind, strategy):
    found = {n: test_exact.bits(rank_pools, n, device="cuda", kind=kind, strategy=strategy) for n in WORLD_SIZES}
    assert found == dict.fromkeys(WORLD_SIZES, found[1])


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_language_model_is_the_same_on_any_number_of_gpus(rank_pools, kind, texts, tmp_path):
    for world_size in WORLD_SIZES:
        path = tmp_path / str(world_size)
        test_exact_lm.run(rank_pools, world_size, test_exact_lm.body_whole, device="cuda", texts=texts, path=path, kind=kind)
        assert_same_run(path, tmp_path / "1")


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_language_model_that_changes_its_number_of_gpus_is_the_same(rank_pools, kind, texts, tmp_path):
    most = WORLD_SIZES[-1]
    test_exact_lm.run(rank_pools, 1, test_exact_lm.body_whole, device="cuda", texts=texts, path=tmp_path / "whole", kind=kind)
    for stage, (world_size, after) in enumerate([(most, 2), (1, 3), (WORLD_SIZES[-2:][0], 2)]):
        test_exact_lm.run(
            rank_pools, world_size, test_exact_lm.body_part,
            device="cuda", texts=texts, path=tmp_path / "parts", kind=kind, after=after, resume=stage > 0,
        )  # fmt: skip
    test_exact_lm.run(rank_pools, most, test_exact_lm.body_rest, device="cuda", texts=texts, path=tmp_path / "parts", kind=kind)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def classify(model, batch, state):
    inputs, targets = batch
    logits = model(inputs)
    correct = (logits.argmax(-1) == targets).sum()
    return F.cross_entropy(logits, targets, reduction="sum"), 0.1 * len(targets), {"correct": correct}, state


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(80, 3))


MODELS = {"perceptron": test_exact.MODELS["perceptron"], "convolutional": (convolutional, (2, 6, 6))}


def body_train_step(capture: str, kind: str, clip_norm: float | None = None, precision: str = "float32"):
    make, shape = MODELS[kind]
    torch.manual_seed(11)
    model = make().cuda()
    adamw = torch.optim.AdamW(model.parameters(), 1e-2)
    optimizer = hora.DistributedOptimizer(adamw, model, bucket_cap_bytes=300, clip_norm=clip_norm)
    train_step = hora.TrainStep(model, classify, optimizer, precision=precision, capture=capture or False)
    loader = hora.DataLoader(test_exact.Augmented(88, shape), global_batch_size=22, micro_batch_size=2, seed=5)
    digests = []
    for _ in range(3):
        for step in loader:
            result = train_step(step)
            moments = [value for entry in optimizer.state.values() for value in entry.values()]
            digests.append(test_exact.digest([*model.state_dict().values(), *moments, result.loss, result.metrics["correct"]]))
    torch.rand(1, device="cuda")  # torch's own generator is as it was
    assert all(other == digests for other in hora.all_gather_object(digests)), "ranks differ"
    return digests, train_step.num_replayed, train_step.eager_because


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0, "precision": "bfloat16"}, {"precision": "float16"}])
def test_captured_steps_have_the_bits_of_eager_ones_on_any_number_of_gpus(rank_pools, kind, options):
    expected = None
    for world_size in WORLD_SIZES:
        for capture in ("", "auto"):
            how = {"backend": None, "device": "cuda", "exact": True}
            arguments = {"capture": capture, "kind": kind, **options}
            outcomes = rank_pools.run(body_train_step, arguments, world_size=world_size, how=how, timeout_s=60.0)
            assert all(outcome.clean for outcome in outcomes), outcomes
            digests, num_replayed, because = outcomes[0].result
            assert (num_replayed, because) == ((9, None) if capture else (0, "capture=False"))
            expected = expected or digests
            assert digests == expected, (world_size, capture)
