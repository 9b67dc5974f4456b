"""Image networks on GPUs: captured steps have the numbers of eager ones."""

from dataclasses import replace
from pathlib import Path

import pytest
from gpu_ranks import WORLD_SIZES

from hora.recipes.image.config import DataConfig, ImageConfig, ModelConfig, OptimizerConfig, SyntheticConfig
from hora.recipes.image.data import load_images
from hora.recipes.image.recipe import train
from hora.recipes.image.trainer import Trainer
from hora.testing import run_ranks

CONFIG = ImageConfig(
    epochs=2,
    model=ModelConfig(arch="resnet20", batch_norm="local"),
    data=DataConfig(path="synthetic", global_batch_size=64, crop_padding=4, flip=True, synthetic=SyntheticConfig(samples=500)),
    optimizer=OptimizerConfig(lr=0.05),
    tensorboard=False,
)


@pytest.mark.parametrize("settings", [{}, {"precision": "bfloat16", "channels_last": True, "ema_decay": 0.9}])
@run_ranks(*WORLD_SIZES[:2], backend="nccl")
def test_captured_run_is_the_eager_one(settings: dict[str, object], tmp_path: Path) -> None:
    config = replace(CONFIG, **settings)
    captured, eager = train(config, tmp_path / "captured"), train(replace(config, capture=False), tmp_path / "eager")
    for epoch in range(2):
        assert captured.train[epoch].loss == pytest.approx(eager.train[epoch].loss, rel=1e-2)
        assert captured.test[epoch].tally.tokens == eager.test[epoch].tally.tokens == 50


@run_ranks(1, backend="nccl")
def test_steps_are_replayed() -> None:
    trainer = Trainer(CONFIG, load_images(CONFIG.data, CONFIG.seed))
    for _ in range(2):
        for step in trainer.loader:
            trainer.update(step)
    assert trainer.train_step.num_replayed > 5, trainer.train_step.eager_because
