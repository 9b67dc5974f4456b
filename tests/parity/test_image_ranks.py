"""The image recipe on any number of ranks has the accuracies of a plain PyTorch loop that knows nothing of ranks; and goes on as if never stopped."""

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_lm_resume import At, assert_same_run, measured, terminate
from torch import Tensor, nn

import hora
from hora import events
from hora.cli.train_image import ImageRequest, train_as_rank
from hora.errors import CheckpointError, CheckpointMismatch, ConfigError
from hora.plan.samples import SamplePlan
from hora.plan.seeds import derive_key, seed_at
from hora.recipes.image.arrays import read_arrays
from hora.recipes.image.augment import augment
from hora.recipes.image.config import DataConfig, ImageConfig, ModelConfig, OptimizerConfig, ScheduleConfig, SyntheticConfig
from hora.recipes.image.data import hold_out, load_images
from hora.recipes.image.models import build_model
from hora.recipes.image.places import locate
from hora.recipes.image.ranks_asked import Join
from hora.recipes.image.recipe import evaluate, train
from hora.recipes.image.report import Report
from hora.recipes.image.trainer import Trainer
from hora.recipes.settings import CheckpointConfig
from hora.testing import run_ranks
from hora.testing.pool import RankPools
from hora.train.checkpoint.checkpointer import Checkpointer

TRAIN, TEST, BATCH, EPOCHS = 97, 41, 30, 2
STEPS = 4  # of an epoch; the last has 7 images
DECAY = 0.9


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first digits, in numbers that no number of ranks divides."""
    directory = tmp_path_factory.mktemp("images")
    found = read_arrays(locate("digits"), SyntheticConfig())
    for word, split, count in (("train", "train", TRAIN), ("t10k", "test", TEST)):
        pixels, labels = (values[:count] for values in found[split])
        for name, values in ((f"{word}-images-idx3-ubyte", pixels[:, 0]), (f"{word}-labels-idx1-ubyte", labels)):
            head = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
            (directory / name).write_bytes(head + values.tobytes())
    return directory


def config_of(images: Path, **settings: Any) -> ImageConfig:
    config = ImageConfig(
        seed=3,
        epochs=EPOCHS,
        model=ModelConfig(arch="convnet"),
        data=DataConfig(path=str(images), global_batch_size=BATCH, eval_batch_size=17, crop_padding=1, flip=True),
        optimizer=OptimizerConfig(lr=0.02, nesterov=True, weight_decay=1e-3, lr_rule="sqrt", base_batch_size=120, clip_norm=20.0),
        schedule=ScheduleConfig(milestones=(1,), gamma=0.5, warmup_epochs=0.5),
        checkpoint=CheckpointConfig(keep_last=20),
        label_smoothing=0.1,
        ema_decay=DECAY,
        tensorboard=False,
    )
    return replace(config, **settings)


def plain_run(images: Path) -> list[dict[str, float]]:
    """The whole of training on one process, written down a second time; what each epoch comes to."""
    arrays = read_arrays(locate(str(images)), SyntheticConfig())
    pixels, labels = (torch.tensor(values) for values in arrays["train"])
    mean, deviation = pixels.double().mean(), pixels.double().std(correction=0)
    model = build_model(ModelConfig(arch="convnet"), channels=1, size=8, num_classes=10, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True, weight_decay=1e-3)
    averages: list[Tensor] = []
    plan, found = SamplePlan(TRAIN, BATCH, seed=3), []
    for epoch in range(EPOCHS):
        key, nll, correct = derive_key("augmentation", 3, epoch), 0.0, 0
        for step in range(STEPS):
            indices = list(plan.global_batch(epoch, step))
            seeds = torch.tensor([seed_at(key, index) - (seed_at(key, index) >> 63 << 64) for index in indices])
            inputs = ((augment(pixels[indices], seeds, padding=1, flip=True).double() - mean) / deviation).float()
            done = epoch * STEPS + step
            optimizer.param_groups[0]["lr"] = 0.01 * min((done + 1) / 3, 1) * 0.5**epoch
            logits = model(inputs)
            optimizer.zero_grad()
            F.cross_entropy(logits, labels[indices].long(), label_smoothing=0.1).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 20.0)
            optimizer.step()
            nll += float(F.cross_entropy(logits.detach(), labels[indices].long(), reduction="sum"))
            correct += int((logits.argmax(1) == labels[indices]).sum())
            now = [parameter.detach().clone() for parameter in model.parameters()]
            averages = [a * DECAY + b * (1 - DECAY) for a, b in zip(averages, now, strict=True)] if averages else now
        found.append(
            {"train loss": nll / TRAIN, "train top1": correct / TRAIN, **plain_evaluation(model, averages, arrays["test"], mean, deviation)}
        )
    return found


def plain_evaluation(model: nn.Module, averages: list[Tensor], arrays: Any, mean: Tensor, deviation: Tensor) -> dict[str, float]:
    pixels, labels = (torch.tensor(values) for values in arrays)
    own = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, average in zip(model.parameters(), averages, strict=True):
            parameter.copy_(average)
        logits = model.eval()(((pixels.double() - mean) / deviation).float())
        model.train()
        for parameter, value in zip(model.parameters(), own, strict=True):
            parameter.copy_(value)
    ranked = logits.argsort(1, descending=True)
    return {
        "test loss": float(F.cross_entropy(logits, labels.long())),
        "test top1": float((ranked[:, 0] == labels).double().mean()),
        "test top5": float((ranked[:, :5] == labels[:, None]).any(1).double().mean()),
    }


@pytest.fixture(scope="module")
def expected(images: Path) -> list[dict[str, float]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = plain_run(images)
    torch.set_num_threads(threads)
    return found


def numbers_of(report: Report) -> list[dict[str, float]]:
    return [
        {
            "train loss": report.train[epoch].loss,
            "train top1": report.train[epoch].top1,
            "test loss": report.test[epoch].loss,
            "test top1": report.test[epoch].top1,
            "test top5": report.test[epoch].top5,
        }
        for epoch in report.test
    ]


def assert_close(found: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float = 1e-4) -> None:
    assert [each.keys() for each in found] == [each.keys() for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == {name: pytest.approx(value, rel=tolerance) for name, value in theirs.items()}


@run_ranks(1, 2, 3)
def test_recipe_has_the_numbers_of_a_plain_loop(images: Path, expected: list[dict[str, float]], tmp_path: Path) -> None:
    """With batch statistics, augmentation, momentum, smoothing, an average of the weights and a last batch of 7."""
    report = train(config_of(images), tmp_path / "run")
    assert_close(numbers_of(report), expected)
    score = evaluate(config_of(images), run_dir=tmp_path / "run")
    assert score == report.test[EPOCHS - 1]
    hora.barrier()
    rows = measured(tmp_path / "run")
    tests = [row for row in rows if row["split"] == "test"]
    assert [row["top1"] for row in tests] == [report.test[epoch].top1 for epoch in range(EPOCHS)]
    assert sum(row["tokens"] for row in rows if row["split"] == "train") == EPOCHS * TRAIN
    assert [row["lr"] for row in tests] == [0.01, 0.005]
    checkpoints = [json.loads(path.read_text()) for path in sorted((tmp_path / "run/checkpoints").glob("*/manifest.json"))]
    assert [manifest["metric"] for manifest in checkpoints] == [row["top1"] for row in tests]


@run_ranks(2)
def test_settings_of_the_step_change_no_more_than_they_must(images: Path, expected: list[dict[str, float]], tmp_path: Path) -> None:
    config = config_of(images)
    assert_close(numbers_of(train(replace(config, strategy="sharded", channels_last=True), tmp_path / "sharded")), expected)
    found = numbers_of(train(replace(config, precision="bfloat16"), tmp_path / "half"))
    assert found[-1]["test loss"] == pytest.approx(expected[-1]["test loss"], rel=0.05)
    assert found[-1]["test loss"] != pytest.approx(expected[-1]["test loss"], rel=1e-6)


@run_ranks(2)
def test_run_that_was_stopped_goes_on_as_if_nothing_had_happened(images: Path, tmp_path: Path) -> None:
    config = replace(config_of(images), model=ModelConfig(arch="wide-resnet", depth=10, widen_factor=1, dropout=0.3))
    whole = train(config, tmp_path / "whole")
    with events.observe(At(STEPS + 1, hora.world_size() - 1, terminate)):
        assert train(config, tmp_path / "parts").preempted
    rest = train(config, tmp_path / "parts", resume=True)
    assert (rest.test[1], rest.train[1]) == (whole.test[1], whole.train[1])
    hora.barrier()
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    # Averaged weights, with the running statistics of BatchNorm, which are not averaged.
    assert evaluate(config, run_dir=tmp_path / "whole") == evaluate(config, init_from=tmp_path / "whole") == whole.test[1]


@run_ranks(2)
def test_what_does_not_fit_is_refused(images: Path, tmp_path: Path) -> None:
    config = config_of(images, epochs=1)
    with pytest.raises(ConfigError, match=r"last global batch of an epoch, of 1 images, they have \[1, 0\]; give data.drop_last=true"):
        train(replace(config, data=replace(config.data, global_batch_size=32)), tmp_path / "run")
    if hora.rank() == 0:
        shutil.copytree(images, tmp_path / "cut")
        (tmp_path / "cut" / "t10k-images-idx3-ubyte").write_bytes((images / "t10k-images-idx3-ubyte").read_bytes()[:-7])
    hora.barrier()
    with pytest.raises(
        ConfigError, match=r"cut/t10k-images-idx3-ubyte must have 2,640 bytes or more by its header, .* but ends at byte 2,633"
    ):
        train(replace(config, data=replace(config.data, path=str(tmp_path / "cut"))), tmp_path / "run")
    with pytest.raises(ConfigError, match="give one of --run-dir and --init-from"):
        evaluate(config)
    assert not (tmp_path / "run").exists()
    local = replace(config, model=ModelConfig(batch_norm="local"), data=replace(config.data, global_batch_size=32, drop_last=True))
    assert train(local, tmp_path / "run").test[0].tally.tokens == TEST  # and buffers were made equal, or the save would have failed
    for other in (replace(local, seed=4), replace(local, data=replace(local.data, path="digits"))):
        with pytest.raises(CheckpointMismatch, match="these are others now: (seed|train, test);"):
            train(other, tmp_path / "run", resume=True)
    with pytest.raises(CheckpointMismatch, match="the images make: missing: stem.0.weight, .* more; unexpected: blocks"):
        evaluate(replace(local, model=ModelConfig(arch="resnet8", batch_norm="local")), run_dir=tmp_path / "run")
    with pytest.raises(CheckpointError):
        evaluate(local, run_dir=tmp_path / "nowhere")


@run_ranks(1, 2)
def test_images_that_are_held_out_choose_the_best_checkpoint(images: Path, tmp_path: Path) -> None:
    config = config_of(images, ema_decay=None)
    config = replace(config, data=replace(config.data, held_out=20, drop_last=True))
    report = train(config, tmp_path / "run")
    assert [score.tally.tokens for score in report.valid.values()] == [20, 20]
    assert [score.tally.tokens for score in report.train.values()] == [60, 60]  # two steps of the 77 that are left
    hora.barrier()
    checkpoints = [json.loads(path.read_text()) for path in sorted((tmp_path / "run/checkpoints").glob("*/manifest.json"))]
    assert [manifest["metric"] for manifest in checkpoints] == [score.top1 for score in report.valid.values()]
    assert [row["top1"] for row in measured(tmp_path / "run") if row["split"] == "valid"] == [s.top1 for s in report.valid.values()]
    trained = Trainer(config, load_images(config.data, config.seed))
    trained.restore_model(Checkpointer(tmp_path / "run/checkpoints").load().state)
    pixels, labels = (torch.tensor(values) for values in read_arrays(locate(str(images)), SyntheticConfig())["train"])
    kept, held = hold_out(TRAIN, 20, seed=3)
    mean, deviation = pixels[kept].double().mean(), pixels[kept].double().std(correction=0)
    own = [parameter.detach().clone() for parameter in trained.model.parameters()]
    expected = plain_evaluation(trained.model, own, (pixels[held].numpy(), labels[held].numpy()), mean, deviation)
    assert report.valid[1].loss == pytest.approx(expected["test loss"], rel=1e-5)
    assert report.valid[1].top1 == pytest.approx(expected["test top1"])
    with pytest.raises(CheckpointMismatch, match="these are others now: train, valid; give the same --data and data.held_out"):
        train(replace(config, data=replace(config.data, held_out=10)), tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match="data.held_out must leave images to train on, but is 97 of 97"):
        train(replace(config, data=replace(config.data, held_out=TRAIN)), tmp_path / "other")


def run_exactly(images: Path, path: Path, stop_after: int | None, resume: bool) -> None:
    config = config_of(images)
    model = ModelConfig(arch="wide-resnet", depth=10, widen_factor=1, dropout=0.2)
    config = replace(config, exact=True, epochs=1, model=model, data=replace(config.data, micro_batch_size=4))
    if stop_after is None:
        train(config, path, resume=resume)
        return
    with events.observe(At(stop_after, hora.world_size() - 1, terminate)):
        assert train(config, path, resume=resume).preempted


def test_exact_run_is_the_same_on_any_number_of_ranks_and_on_several_in_turn(images: Path, tmp_path: Path, rank_pools: RankPools) -> None:
    def run(world_size: int, name: str, stop_after: int | None = None, *, resume: bool = False) -> None:
        arguments = {"images": images, "path": tmp_path / name, "stop_after": stop_after, "resume": resume}
        how = {"backend": None, "device": "cpu", "exact": True}
        outcomes = rank_pools.run(run_exactly, arguments, world_size=world_size, how=how, timeout_s=100.0)
        assert all(outcome.clean for outcome in outcomes), outcomes

    run(1, "one")
    run(2, "two")
    run(3, "parts", stop_after=0)
    run(2, "parts", resume=True)
    assert_same_run(tmp_path / "two", tmp_path / "one")
    assert_same_run(tmp_path / "parts", tmp_path / "one")


def train_and_evaluate_by_hand(images: Path, path: Path, rank: int) -> list[int]:
    overrides = ("epochs=1", "data.global_batch_size=30", "tensorboard=false")
    request = ImageRequest("digits", str(images), overrides, run_dir=path / "run", device="cpu", backend="gloo")
    trained = train_as_rank(request, Join(rank, 2, f"file://{path / 'first'}"))
    before = sorted(each.name for each in (path / "run").rglob("*"))
    later = ImageRequest(run_dir=path / "run", evaluate=True, device="cpu", backend="gloo")
    evaluated = train_as_rank(later, Join(rank, 2, f"file://{path / 'second'}"))
    assert sorted(each.name for each in (path / "run").rglob("*")) == before
    return [trained, evaluated]


def test_processes_that_are_started_one_by_one_train_and_evaluate_together(images: Path, tmp_path: Path, spawn_ranks) -> None:
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    processes = [
        spawn_ranks(1, train_and_evaluate_by_hand, join=False, environ=environ, images=images, path=tmp_path, rank=rank)
        for rank in range(2)
    ]
    outcomes = [process.wait()[0] for process in processes]
    assert [outcome.result for outcome in outcomes] == [[0, 0]] * 2
    (row,) = (row for row in measured(tmp_path / "run") if row["split"] == "test")
    assert f"test loss {row['loss']:.4f}, accuracy {row['top1']:.4f}, among five {row['top5']:.4f}" in outcomes[0].printed
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert json.loads((checkpoint / "manifest.json").read_text())["world_size"] == 2


def test_folder_of_images_is_trained_on(tmp_path: Path, rank_pools: RankPools) -> None:
    image = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 3)):
        for number, name in enumerate(("dark", "light")):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(128 * number, 128 * number + 60, (20 + index, 24, 3), dtype=np.uint8)
                image.fromarray(pixels).save(tmp_path / "images" / split / name / f"{index}.png")
    for world_size in (1, 2):
        arguments = {"images": tmp_path / "images", "path": tmp_path / str(world_size)}
        outcomes = rank_pools.run(run_folder, arguments, world_size=world_size, how={"backend": None, "device": "cpu"}, timeout_s=100.0)
        assert all(outcome.clean for outcome in outcomes), outcomes
    one, two = (measured(tmp_path / name) for name in ("1", "2"))
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-4)


def run_folder(images: Path, path: Path) -> None:
    data = DataConfig(path=str(images), global_batch_size=6, eval_batch_size=4, size=16, flip=True, num_workers=hora.world_size() - 1)
    report = train(ImageConfig(epochs=2, data=data, tensorboard=False), path)
    assert report.test[1].tally.tokens == 6
