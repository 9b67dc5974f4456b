"""The tests of the lm recipe again, on CUDA tensors and NCCL, on as many GPUs as there are; and its steps are CUDA graphs."""

from pathlib import Path

import pytest
import test_lm_perplexity
from again import collect
from gpu_ranks import WORLD_SIZES
from test_lm_perplexity import CONFIGS, config_of
from test_lm_perplexity import expected_perplexities as expected_perplexities
from test_lm_perplexity import texts as texts

from hora.recipes.lm.data import load_corpus
from hora.recipes.lm.trainer import Trainer
from hora.testing import run_ranks

globals().update(collect(test_lm_perplexity, "nccl", WORLD_SIZES, timeout_s=120.0))


@pytest.mark.parametrize("kind", CONFIGS)
@run_ranks(*WORLD_SIZES[:2], backend="nccl")
def test_steps_are_replayed(kind: str, texts: Path) -> None:
    config = config_of(kind, texts)
    trainer = Trainer(config, load_corpus(config.data))
    for _ in range(2):
        for step in trainer.stream:
            trainer.update(step)
    assert trainer.step > 30
    assert trainer.train_step.num_replayed >= trainer.step - 12, trainer.train_step.eager_because
