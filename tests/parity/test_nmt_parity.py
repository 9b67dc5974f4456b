"""The translation recipe on any number of ranks trains the model of a plain PyTorch loop that knows nothing of ranks."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import hora
from hora import events
from hora.errors import CheckpointMismatch, ConfigError
from hora.recipes.nmt.config import BleuConfig, DataConfig, ModelConfig, NmtConfig, OptimizerConfig, ScheduleConfig, TrainingConfig
from hora.recipes.nmt.corpus import Corpus, load_corpus
from hora.recipes.nmt.evaluation import evaluate
from hora.recipes.nmt.models import build_model
from hora.recipes.nmt.recipe import Start, train
from hora.recipes.nmt.report import Report
from hora.recipes.nmt.stream import PairStream
from hora.recipes.nmt.symbols import PAD
from hora.recipes.nmt.texts import EXCERPT
from hora.testing import run_ranks
from hora.testing.pool import RankPools

PAIRS = {"train": 61, "valid": 17, "test": 5}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first pairs of the excerpt, in numbers that no number of ranks divides; one is far longer than the others."""
    directory = tmp_path_factory.mktemp("texts")
    begin = 0
    for split, count in PAIRS.items():
        for language in ("en", "de"):
            lines = (EXCERPT / f"train.{language}").read_text(encoding="utf-8").split("\n")[begin : begin + count]
            if split == "train":
                lines[7] = " ".join(lines[:4])
            (directory / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
        begin += count
    return directory


def config_of(texts: Path, **training: Any) -> NmtConfig:
    files = {f"{split}_data": (str(texts / f"{split}.en"), str(texts / f"{split}.de")) for split in PAIRS}
    given = {"batching_key": "tokens", "batch_size": 70, "max_epochs": 2, "valid_batch_size": 4, "num_kept_checkpoints": 9, **training}
    return NmtConfig(
        DataConfig(**files, cache=str(texts / "cache")),  # type: ignore[arg-type]
        ModelConfig(n_layers=1, n_head=2, d_word_vec=8, d_model=8, d_inner_hid=16, dropout=0.0, label_smoothing=0.1),
        OptimizerConfig(optimizer="sgd", learning_rate=0.3, grad_clip=0.5, optimizer_params={"momentum": 0.9}, schedule_method="isqrt",
                        scheduler_configs=ScheduleConfig(warmup_steps=3, decay_steps=5, init_lr=0.0)),
        TrainingConfig(seed=3, tensorboard=False, **given),
    )  # fmt: skip


def plain_stream(corpus: Corpus, config: NmtConfig) -> PairStream:
    training = config.training_configs
    return PairStream(
        corpus.texts["train"], corpus.digest, batch_size=training.batch_size * training.update_cycle, key=training.batching_key,
        use_bucket=training.use_bucket, seed=training.seed, rank=0, world_size=1,
    )  # fmt: skip


def plain_loss(logits: torch.Tensor, wanted: torch.Tensor, training: TrainingConfig) -> torch.Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=PAD, label_smoothing=0.1, reduction="none").view_as(wanted)
    lengths = (wanted != PAD).sum(1)
    if training.norm_by_words:
        return sum(row.sum() / length for row, length in zip(each, lengths, strict=True) if length) / (lengths > 0).sum()
    return each.sum() / (lengths.sum() if training.normalize == "tokens" else (lengths > 0).sum())


def plain_run(config: NmtConfig, corpus: Corpus) -> dict[str, torch.Tensor]:
    """The weights after all epochs, on one process that takes each global batch at once."""
    training, optimizing = config.training_configs, config.optimizer_configs
    model = build_model(config.model_configs, len(corpus.vocabularies.source), len(corpus.vocabularies.target), seed=training.seed)
    optimizer = torch.optim.SGD(model.parameters(), optimizing.learning_rate, momentum=0.9)
    done = 0
    stream = plain_stream(corpus, config)
    for _ in range(training.max_epochs):
        for step in stream:
            ((source, target),) = step
            done += 1
            optimizer.param_groups[0]["lr"] = 0.3 * ((done - 1) / 2 if done <= 3 else min(1.0, (5 / done) ** 0.5))
            optimizer.zero_grad()
            plain_loss(model(source, target[:, :-1]), target[:, 1:], training).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), optimizing.grad_clip)
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def newest(path: Path) -> Path:
    return max((path / "checkpoints").iterdir(), key=lambda each: (each.name.split(".g")[0], int(each.name.split(".g")[1])))


def everything(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint."""
    files = [file for file in newest(path).glob("*.safetensors") if not file.name.startswith("rank-")]
    return {f"{file.stem}.{name}": tensor for file in files for name, tensor in load_file(file).items()}


def measured(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [row | {"tokens_per_s": None} for row in rows]


@run_ranks(1, 2, 3)
def test_weights_are_those_of_a_plain_loop(texts: Path, tmp_path: Path) -> None:
    for number, training in enumerate(
        [
            {"normalize": "tokens", "update_cycle": 2},
            {"normalize": "sentences", "use_bucket": False},
            {"norm_by_words": True, "batching_key": "samples", "batch_size": 9},
        ]
    ):
        config = config_of(texts, max_epochs=1, **training)
        train(config, tmp_path / str(number))
        hora.barrier()
        expected = plain_run(config, load_corpus(config.data_configs))
        found = load_file(newest(tmp_path / str(number)) / "model.safetensors")
        assert len(set(found) & set(expected)) > 10
        for name in set(found) & set(expected):  # of tied weights a checkpoint has one
            torch.testing.assert_close(found[name], expected[name], rtol=2e-4, atol=2e-6)


@run_ranks(1, 3)
def test_validation_is_that_of_one_process_and_sentence_by_sentence(texts: Path) -> None:
    config = config_of(texts)
    corpus = load_corpus(config.data_configs)
    model = build_model(config.model_configs, len(corpus.vocabularies.source), len(corpus.vocabularies.target), seed=1)
    model = model.to(hora.device(), torch.float64)
    tally = evaluate(model, PairStream(corpus.texts["valid"], "", batch_size=4, shuffle=False))
    nll, tokens, text = 0.0, 0, corpus.texts["valid"]
    for index in range(len(text)):
        source = torch.tensor([[*text.source[index], 1]], device=hora.device())
        target = torch.tensor([[2, *text.target[index], 1]], device=hora.device())
        logits = model(source, target[:, :-1])
        nll += F.cross_entropy(logits[0].float(), target[0, 1:], reduction="sum").item()
        tokens += target.size(1) - 1
    assert tally.tokens == tokens
    assert tally.loss == pytest.approx(nll / tokens, rel=1e-6)
    assert model.training


class At(events.Observer):
    """Acts once, on one rank, when step `step` of this process has been done."""

    def __init__(self, step: int, rank: int, act: Callable[[], None]) -> None:
        self._step, self._rank, self._act = step, rank, act

    def on_step(self, *, step: int, values: dict[str, float]) -> None:
        if step == self._step and hora.rank() == self._rank:
            self._act()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def stopped_run(config: NmtConfig, path: Path, *, after: int, resume: bool = False) -> Report:
    with events.observe(At(after - 1, hora.world_size() - 1, terminate)):
        return train(config, path, Start(resume=resume))


def with_everything(texts: Path) -> NmtConfig:
    """All that a checkpoint must bring back matters: dropout, averages, a plateau, validations in the middle of epochs."""
    config = config_of(texts, loss_valid_freq=2, save_freq=3, disp_freq=2, moving_average_method="ema", moving_average_alpha=0.5)
    optimizer = OptimizerConfig("adamw", 0.05, 0.5, {"betas": [0.9, 0.98]}, "loss", ScheduleConfig(patience=0, scale=0.7))
    return replace(config, model_configs=replace(config.model_configs, dropout=0.3), optimizer_configs=optimizer)


@run_ranks(2)
def test_stopped_run_goes_on_as_if_nothing_had_happened(texts: Path, tmp_path: Path) -> None:
    config = with_everything(texts)
    whole = train(config, tmp_path / "whole")
    length = max(whole.valid) // 2
    for after in (2, length):  # where a validation is due, at the end of an epoch
        path = tmp_path / f"parts{after}"
        first = stopped_run(config, path, after=after)
        assert first.preempted in ("SIGTERM", "another rank")
        second = train(config, path, Start(resume=True))
        assert second.test == whole.test
        assert first.valid | second.valid == whole.valid
        hora.barrier()
        ours, theirs = everything(path), everything(tmp_path / "whole")
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
        assert measured(path) == measured(tmp_path / "whole")


@run_ranks(1)
def test_a_run_is_judged_by_one_measure_from_beginning_to_end(texts: Path, tmp_path: Path) -> None:
    train(config_of(texts, max_steps=1, loss_valid_freq=1), tmp_path / "run")
    with pytest.raises(CheckpointMismatch, match=r"was judged by loss and would now be by bleu; set training_configs.bleu_valid_freq to 0"):
        train(config_of(texts, max_steps=2, bleu_valid_freq=1), tmp_path / "run", Start(resume=True))


@run_ranks(2)
def test_steps_and_early_stopping_end_all_ranks_where_they_should(texts: Path, tmp_path: Path) -> None:
    by_steps = train(config_of(texts, max_steps=3, loss_valid_freq=0), tmp_path / "steps")
    assert list(by_steps.valid) == [3]
    assert not by_steps.stopped_early
    assert by_steps.epoch_s == {}
    config = config_of(texts, max_epochs=50, loss_valid_freq=1, early_stop_patience=2)
    config = replace(config, optimizer_configs=OptimizerConfig("sgd", 1e-30))  # which changes nothing
    early = train(config, tmp_path / "early")
    assert early.stopped_early
    assert list(early.valid) == [1, 2, 3]
    hora.barrier()
    assert newest(tmp_path / "early").name == "step-00000003.g0"
    training = replace(config.training_configs, batch_size=900, loss_valid_freq=None, early_stop_patience=1)
    by_epochs = train(replace(config, training_configs=training), tmp_path / "epochs")
    assert by_epochs.stopped_early
    assert list(by_epochs.epoch_s) == [0, 1]  # the last one was completed too


@run_ranks(2)
def test_bleu_is_measured_when_due_and_chooses_the_best(texts: Path, tmp_path: Path) -> None:
    how = BleuConfig(max_steps=8, beam_size=2)
    config = config_of(texts, max_steps=4, bleu_valid_freq=2, loss_valid_freq=0, bleu_valid_batch_size=8, bleu_valid_configs=how)
    report = train(config, tmp_path)
    assert list(report.bleu) == [2, 4]
    assert list(report.valid) == [4]  # at the end in any case
    assert hora.all_gather_object(list(report.bleu.values())) == [list(report.bleu.values())] * 2
    hora.barrier()
    for step, bleu in report.bleu.items():
        lines = (tmp_path / "valid" / f"trans.iter{step}.txt").read_text().splitlines()
        assert len(lines) == PAIRS["valid"]
        manifest = json.loads((tmp_path / "checkpoints" / f"step-0000000{step}.g0" / "manifest.json").read_text())
        assert manifest["metric"] == pytest.approx(bleu)
    assert [row["bleu"] for row in measured(tmp_path) if row["split"] == "valid" and row["bleu"] is not None] == list(report.bleu.values())
    assert newest(tmp_path).name == "step-00000004.g0"
    (tmp_path / "short").write_text("a\n")
    with pytest.raises(ConfigError, match=r"a line for each of the 17 sentences, but .*short has 1"):
        train(replace(config, data_configs=replace(config.data_configs, bleu_valid_reference=str(tmp_path / "short"))), tmp_path / "b")
    learned = replace(config.model_configs, positional_embedding="learned")
    too_far = replace(config.training_configs, bleu_valid_configs=replace(how, max_steps=1025))
    with pytest.raises(ConfigError, match=r"up to 1024 symbols, but the longest sentence has \d+, .*max_steps is 1025"):
        train(replace(config, model_configs=learned, training_configs=too_far), tmp_path / "b")
    if hora.rank() == 0:
        (tmp_path / "valid.en").write_bytes((texts / "valid.en").read_bytes() + b"a " * 1024 + b"\n")
        (tmp_path / "valid.de").write_bytes((texts / "valid.de").read_bytes() + b"a\n")
    far = replace(config.data_configs, valid_data=(str(tmp_path / "valid.en"), str(tmp_path / "valid.de")))
    with pytest.raises(ConfigError, match=r"up to 1024 symbols, but the longest sentence has 1025, "):
        train(replace(config, model_configs=learned, data_configs=far), tmp_path / "b")
    assert not (tmp_path / "b").exists()


@run_ranks(2)
def test_precision_strategy_and_sums_in_turn_change_the_model_little(texts: Path, tmp_path: Path) -> None:
    expected = train(config_of(texts), tmp_path / "plain").test
    for number, (settings, tolerance) in enumerate([({"strategy": "sharded"}, 1e-5), ({"precision": "bfloat16"}, 0.03)]):
        assert train(config_of(texts, **settings), tmp_path / str(number)).test == pytest.approx(expected, rel=tolerance)


def exact_config(texts: Path) -> NmtConfig:
    """Dropout, and micro-batches in which some logical ranks have no sentence."""
    config = with_everything(texts)
    return replace(config, training_configs=replace(config.training_configs, exact=True, max_steps=6, loss_valid_freq=3))


def body_whole(texts: Path, path: Path) -> None:
    train(exact_config(texts), path)


def body_part(texts: Path, path: Path) -> None:
    assert stopped_run(exact_config(texts), path, after=3).preempted


def body_rest(texts: Path, path: Path) -> None:
    train(exact_config(texts), path, Start(resume=True))


def test_exact_run_is_the_same_on_other_ranks_and_on_several_in_turn(texts: Path, tmp_path: Path, rank_pools: RankPools) -> None:
    runs = [(1, body_whole, "whole"), (2, body_part, "parts"), (3, body_rest, "parts")]
    for world_size, body, name in runs:
        how = {"backend": None, "device": "cpu", "exact": True}
        outcomes = rank_pools.run(body, {"texts": texts, "path": tmp_path / name}, world_size=world_size, how=how, timeout_s=100.0)
        assert all(outcome.clean for outcome in outcomes), outcomes
    ours, theirs = everything(tmp_path / "parts"), everything(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert measured(tmp_path / "parts") == measured(tmp_path / "whole")
