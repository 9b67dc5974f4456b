"""The recipe on any number of ranks has the perplexities of a plain PyTorch loop that knows nothing of ranks."""

import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hora
from hora.recipes.lm import recipe
from hora.recipes.lm.config import CheckpointConfig, DataConfig, LmConfig, ModelConfig, OptimizerConfig, ScheduleConfig
from hora.recipes.lm.evaluation import evaluate
from hora.recipes.lm.model import LanguageModel, build_model
from hora.recipes.lm.recipe import train
from hora.recipes.lm.text import EXCERPT
from hora.testing import run_ranks
from hora.train.checkpoint.checkpointer import Checkpointer

ROWS, WINDOW = 7, 5
Expected = dict[str, dict[str, list[float]]]
CONFIGS = {
    "lstm": LmConfig(
        seed=3,
        epochs=2,
        model=ModelConfig(hidden_size=12),
        optimizer=OptimizerConfig(lr=0.3),
        schedule=ScheduleConfig(last_full_epoch=0),
    ),
    "transformer": LmConfig(
        seed=3,
        epochs=2,
        model=ModelConfig(kind="transformer", hidden_size=12, num_heads=3, init_scale=0.02),
        optimizer=OptimizerConfig(kind="adamw", lr=1e-3, clip_norm=1.0, normalize="tokens"),
        schedule=ScheduleConfig(kind="cosine", warmup_steps=10),
    ),
}


def config_of(kind: str, texts: Path, micro_batch_size: int | None = None) -> LmConfig:
    config = CONFIGS[kind]
    data = DataConfig(path=str(texts), rows=ROWS, window=WINDOW, max_vocabulary=90, micro_batch_size=micro_batch_size)
    return replace(config, data=data, tensorboard=False)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first words of the excerpt, in numbers that no number of rows divides."""
    directory = tmp_path_factory.mktemp("texts")
    for split, count in (("train", 700), ("valid", 211), ("test", 173)):
        words = (EXCERPT / f"{split}.txt").read_text(encoding="utf-8").split()[:count]
        (directory / f"{split}.txt").write_text("\n".join(" ".join(words[at : at + 17]) for at in range(0, count, 17)), encoding="utf-8")
    return directory


def plain_tokens(texts: Path) -> dict[str, Tensor]:
    """Words and their numbers, written down a second time and shorter."""
    words = {
        split: (texts / f"{split}.txt").read_text(encoding="utf-8").replace("\n", " <eos> ").split() for split in ("train", "valid", "test")
    }
    words = {split: [*found, "<eos>"] for split, found in words.items()}
    counts = Counter(words["train"])
    kept = [word for word in sorted(counts, key=lambda word: (-counts[word], word)) if word != "<unk>"][:89]
    unknown = sum(counts.values()) - sum(counts[word] for word in kept)
    ranked = sorted([(-counts[word], word) for word in kept] + [(-unknown, "<unk>")])
    index = {word: number for number, (_, word) in enumerate(ranked)}
    return {split: torch.tensor([index.get(word, index["<unk>"]) for word in found]) for split, found in words.items()}


def plain_evaluation(model: LanguageModel, tokens: Tensor) -> float:
    """Perplexity with each row, of its own length, read alone from its beginning to its end."""
    starts = [part[0].item() for part in torch.arange(len(tokens) - 1).tensor_split(ROWS)] + [len(tokens) - 1]
    nll = 0.0
    model.eval()
    with torch.no_grad():
        for begin, end in itertools.pairwise(starts):
            state, lengths = model.initial_state(1), [WINDOW] * ((len(tokens) - 1) // ROWS // WINDOW)
            lengths += [rest for rest in ((len(tokens) - 1) // ROWS % WINDOW, end - begin - (len(tokens) - 1) // ROWS) if rest]
            for length in lengths:
                logits, state = model(tokens[None, begin : begin + length], state)
                nll += F.cross_entropy(logits[0].double(), tokens[begin + 1 : begin + 1 + length], reduction="sum").item()
                begin += length
            assert begin == end
    model.train()
    return math.exp(nll / (len(tokens) - 1))


def plain_run(config: LmConfig, texts: Path) -> dict[str, list[float]]:
    """The whole of training on one process; perplexities by split."""
    tokens = plain_tokens(texts)
    model = build_model(config.model, vocabulary_size=90, window=WINDOW, seed=config.seed)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = config.optimizer.kind == "adamw"
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, weight_decay=0) if adam else torch.optim.SGD(parameters)
    length = len(tokens["train"]) // ROWS
    rows = tokens["train"][: ROWS * length].view(ROWS, length)
    starts = range(0, length - WINDOW, WINDOW)
    found: dict[str, list[float]] = {"valid": [], "test": []}
    for epoch in range(config.epochs):
        state = model.initial_state(ROWS)
        for step, start in enumerate(starts):
            done = epoch * len(starts) + step
            peak = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (done - 10) / (config.epochs * len(starts) - 11)))
            lr = (1e-3 * (min(done + 1, 11) / 11 if done < 10 else peak)) if adam else 0.3 * 0.5**epoch
            optimizer.param_groups[0]["lr"] = lr
            logits, state = model(rows[:, start : start + WINDOW], state)
            state = tuple(tensor.detach() for tensor in state)
            loss = F.cross_entropy(logits.transpose(1, 2), rows[:, start + 1 : start + WINDOW + 1], reduction="sum")
            optimizer.zero_grad()
            (loss / (ROWS * WINDOW if adam else ROWS)).backward()
            torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.clip_norm)
            optimizer.step()
        found["valid"].append(plain_evaluation(model, tokens["valid"]))
    found["test"].append(plain_evaluation(model, tokens["test"]))
    return found


@pytest.fixture(scope="module")
def expected_perplexities(texts: Path) -> Expected:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {kind: plain_run(config_of(kind, texts), texts) for kind in CONFIGS}
    torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize(("kind", "micro_batch_size"), [("lstm", None), ("lstm", 2), ("transformer", 2)])
@run_ranks(1, 2, 3, 4)
def test_perplexities_are_those_of_a_plain_loop(
    kind: str, micro_batch_size: int | None, texts: Path, expected_perplexities: Expected, tmp_path: Path
) -> None:
    config = config_of(kind, texts, micro_batch_size)
    report = train(config, tmp_path)
    expected = expected_perplexities[kind]
    assert list(report.valid.values()) == pytest.approx(expected["valid"], rel=1e-5)
    assert report.test == pytest.approx(expected["test"][0], rel=1e-5)
    assert report.test < 80  # of 90 words: something has been learnt


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [({"strategy": "sharded"}, 1e-5), ({"precision": "bfloat16"}, 0.02), ({"precision": "float16", "strategy": "deferred"}, 0.05)],
)
@run_ranks(2, 3)
def test_settings_of_the_step_change_the_model_by_their_precision_alone(
    settings: dict[str, str], tolerance: float, texts: Path, expected_perplexities: Expected, tmp_path: Path
) -> None:
    """Updates that float16 leaves out at first, until the loss scale has sunk, are missing in so short a run."""
    report = train(replace(config_of("transformer", texts), **settings), tmp_path)
    assert list(report.valid.values()) == pytest.approx(expected_perplexities["transformer"]["valid"], rel=tolerance)
    scales = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("checkpoints/*/train_step.json"))]
    assert [bool(scale) for scale in scales] == [settings.get("precision") == "float16"] * 2


@pytest.mark.parametrize("num_tokens", [ROWS + 1, 50, ROWS * WINDOW * 2 + 1, 97])
@run_ranks(1, 2, 3, 4)
def test_evaluation_on_ranks_equals_that_of_one_process(num_tokens: int) -> None:
    model = build_model(ModelConfig(hidden_size=8, keep_prob=0.5), vocabulary_size=20, window=WINDOW, seed=1).to(
        hora.device(), torch.float64
    )
    tokens = torch.randint(20, (num_tokens,), generator=torch.Generator().manual_seed(5)).to(hora.device())
    tally = evaluate(model, tokens, DataConfig(rows=ROWS, window=WINDOW))
    assert tally.tokens == num_tokens - 1
    assert tally.perplexity == pytest.approx(plain_evaluation(model, tokens), rel=1e-12)
    assert model.training


@run_ranks(1, 2)
def test_metrics_hold_about_ten_training_rows_an_epoch_and_each_evaluation(texts: Path, tmp_path: Path) -> None:
    report = train(config_of("lstm", texts), tmp_path)
    hora.barrier()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    splits = Counter((row["split"], row["epoch"]) for row in rows)
    assert splits == {("train", 0): 10, ("train", 1): 10, ("valid", 0): 1, ("valid", 1): 1, ("test", 1): 1}
    trained = [row for row in rows if row["split"] == "train" and row["epoch"] == 0]
    tokens = sum(row["tokens"] for row in trained)
    assert tokens == (len(plain_tokens(texts)["train"]) // ROWS - 1) // WINDOW * WINDOW * ROWS
    mean = sum(row["loss"] * row["tokens"] for row in trained) / tokens
    assert math.exp(mean) == pytest.approx(report.train[0])
    assert [row["lr"] for row in rows if row["split"] == "valid"] == [0.3, 0.15]


@run_ranks(1)
def test_speed_counts_neither_validation_nor_saving(texts: Path, tmp_path: Path) -> None:
    """A clock that leaps by 1000 s in both."""
    leapt, perf_counter = [0.0], time.perf_counter

    def leaping(act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            leapt[0] += 1000
            return act(*args, **options)

        return wrapped

    config = replace(config_of("lstm", texts), checkpoint=CheckpointConfig(every_steps=5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: perf_counter() + leapt[0])
        patch.setattr(recipe, "evaluate", leaping(evaluate))
        patch.setattr(Checkpointer, "save", leaping(Checkpointer.save))
        report = train(config, tmp_path)
    assert leapt[0] >= 8000
    assert sum(report.epoch_s.values()) < 1000
    assert min(report.tokens_per_s) > 1
