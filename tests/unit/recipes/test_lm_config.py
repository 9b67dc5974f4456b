from dataclasses import asdict

import pytest

from hora.errors import ConfigError
from hora.recipes.lm.config import NAMED, LmConfig, ModelConfig, canonical_name
from hora.train.config import dump_config, load_config

# hidden size, init scale, keep_prob, window, epochs, decay, last epoch at the full rate, clip norm
PUBLISHED = {
    "small": (200, 0.1, 1.0, 20, 13, 0.5, 3, 5.0),
    "medium": (650, 0.05, 0.5, 35, 39, 0.8, 5, 5.0),
    "large": (1500, 0.04, 0.35, 35, 55, 1 / 1.15, 14, 10.0),
    "large-original": (1500, 0.04, 0.35, 35, 55, 1 / 1.15, 13, 10.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_lstm_has_the_published_numbers(name: str) -> None:
    config = NAMED[name]
    model, data, optimizer, schedule = config.model, config.data, config.optimizer, config.schedule
    assert PUBLISHED[name] == (
        model.hidden_size, model.init_scale, model.keep_prob, data.window, config.epochs, schedule.decay, schedule.last_full_epoch,
        optimizer.clip_norm,
    )  # fmt: skip
    assert (model.kind, model.num_layers, data.rows) == ("lstm", 2, 20)
    assert (optimizer.kind, optimizer.lr, optimizer.normalize) == ("sgd", 1.0, "rows")


@pytest.mark.parametrize("name", NAMED)
def test_named_configuration_passes_its_own_checks_and_survives_yaml(name: str, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(NAMED[name]))
    assert load_config(LmConfig, tmp_path / "config.yaml") == load_config(LmConfig, defaults=asdict(NAMED[name])) == NAMED[name]


@pytest.mark.parametrize(
    "override",
    [
        "epochs=0", "seed=-1", "model.hidden_size=0", "model.keep_prob=0.0", "model.keep_prob=1.5", "data.rows=0", "data.window=0",
        "data.max_vocabulary=1", "optimizer.lr=0.0", "optimizer.lr=.nan", "optimizer.lr=.inf", "optimizer.clip_norm=-1.0",
        "schedule.decay=0.0", "checkpoint.every_steps=0", "checkpoint.keep_last=0",
    ],
)  # fmt: skip
def test_impossible_value_is_refused_by_name(override: str) -> None:
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        load_config(LmConfig, overrides=[override])


def test_heads_must_divide_the_hidden_size() -> None:
    with pytest.raises(ConfigError, match="hidden_size = 200 must be a multiple of num_heads = 3"):
        load_config(LmConfig, overrides=["model.num_heads=3"])
    assert ModelConfig(num_heads=4).num_heads == 4


@pytest.mark.parametrize(("spelling", "name"), [("config_small", "small"), ("large_original", "large-original"), ("demo", "demo")])
def test_name_may_be_spelled_as_texar_does(spelling: str, name: str) -> None:
    assert canonical_name(spelling) == name
