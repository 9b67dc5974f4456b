"""The directory of a translation run as training leaves it, made without training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hora.recipes.nmt.config import DataConfig, ModelConfig, NmtConfig, TrainingConfig
from hora.recipes.nmt.models import TranslationModel, build_model
from hora.recipes.nmt.vocabulary import Vocabularies, WordVocabulary
from hora.recipes.vocabularies import FILE_NAME
from hora.train.checkpoint.content import Entry
from hora.train.checkpoint.manifest import CheckpointName, Manifest
from hora.train.checkpoint.storage import Storage
from hora.train.config import dump_config

WORDS = tuple("abcdefghi")


def make_model(seed: int) -> TranslationModel:
    """One that has strong opinions, so that translations of many lengths are found."""
    config = make_config().model_configs
    model = build_model(config, 4 + len(WORDS), 4 + len(WORDS), seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def make_config(**training: Any) -> NmtConfig:
    model = ModelConfig(n_layers=1, n_head=2, d_word_vec=8, d_model=8, d_inner_hid=16, tie_input_output_embedding=False)
    return NmtConfig(DataConfig(("a", "b"), ("c", "d")), model, training_configs=TrainingConfig(**training))


def make_run(
    path: Path,
    seeds: dict[int, int],
    metrics: dict[int, float] | None = None,
    *,
    average: int | None = None,
    words: Any = WORDS,
    **training: Any,
) -> Path:
    """Makes the directory: `seeds` of the models by step, `metrics` by step, `average` the seed of averaged weights; returns `path`."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(dump_config(make_config(**training)), encoding="utf-8")
    vocabulary = WordVocabulary(tuple(words))
    (path / FILE_NAME).write_text(Vocabularies(vocabulary, vocabulary).to_json(), encoding="utf-8")
    storage = Storage(path / "checkpoints")
    for step, seed in seeds.items():
        state: dict[str, Any] = {"model": make_model(seed).state_dict()}
        if average is not None:
            state["average"] = {"num_updates": 3, "weights": dict(make_model(average).named_parameters())}
        with storage.write(CheckpointName(generation=0, step=step)) as draft:
            for file in [file for entry, tree in state.items() for file in Entry.of(entry, tree).files()]:
                draft.add(file.name, file.chunks())
            metric = (metrics or {}).get(step)
            facts = Manifest(1, "0.1", "2.10", step, 0, 0, 1, 1, None, "a chip", metric, "2030-01-01T00:00:00+00:00", {})
            storage.commit(draft, replace(facts, files=draft.files))
    return path
