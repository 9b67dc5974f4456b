from dataclasses import asdict, replace

import pytest

from hora.errors import ConfigError
from hora.recipes.image.config import ImageConfig, OptimizerConfig
from hora.recipes.image.named import NAMED
from hora.recipes.image.resolve import default_name, resolve_config
from hora.train.config import dump_config, load_config
from hora.train.schedules import step_decay, warmup


@pytest.mark.parametrize("name", NAMED)
def test_named_configuration_passes_its_own_checks_and_survives_yaml(name: str, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(NAMED[name]))
    assert load_config(ImageConfig, tmp_path / "config.yaml") == load_config(ImageConfig, defaults=asdict(NAMED[name])) == NAMED[name]
    assert resolve_config(name).epochs == NAMED[name].epochs


@pytest.mark.parametrize(("rule", "lr"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_learning_rate_follows_the_batch_by_the_rule_that_is_chosen(rule: str, lr: float) -> None:
    config = ImageConfig(optimizer=OptimizerConfig(lr=0.1, lr_rule=rule, base_batch_size=25))  # type: ignore[arg-type]
    assert config.lr == pytest.approx(lr)
    assert replace(config, optimizer=replace(config.optimizer, base_batch_size=100)).lr == 0.1


def test_rate_falls_at_milestones_and_rises_at_the_beginning() -> None:
    assert [step_decay(epoch, milestones=(2, 3), gamma=0.1) for epoch in range(5)] == pytest.approx([1, 1, 0.1, 0.01, 0.01])
    assert step_decay(9, milestones=(), gamma=0.1) == 1
    assert [warmup(step, warmup_steps=3) for step in range(5)] == [0.25, 0.5, 0.75, 1, 1]
    assert warmup(0, warmup_steps=0) == 1


@pytest.mark.parametrize(
    "override",
    [
        "epochs=0", "data.global_batch_size=0", "data.crop_padding=-1", "optimizer.lr=0.0", "optimizer.lr_rule=square", "schedule.gamma=0.0",
        "schedule.milestones=[0]", "label_smoothing=1.0", "ema_decay=1.0", "model.dropout=1.0", "data.synthetic.classes=1", "precision=half",
    ],
)  # fmt: skip
def test_impossible_value_is_refused_by_name(override: str) -> None:
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        load_config(ImageConfig, overrides=[override])


def test_nesterov_needs_a_momentum() -> None:
    with pytest.raises(ConfigError, match="needs both"):
        load_config(ImageConfig, overrides=["optimizer.nesterov=true", "optimizer.momentum=0.0"])


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ["model.arch=resnet20", "model.dropout=0.3"],
            "model.dropout is of model.arch = wide-resnet and densenet alone, but that is resnet",
        ),
        (["model.arch=vgg19", "model.cardinality=4"], "model.cardinality is of model.arch = resnext alone"),
        (["model.arch=resnet", "model.widen_factor=4"], "model.widen_factor is of"),
        (["model.growth_rate=40"], "model.growth_rate is of"),
        (["optimizer.kind=adamw", "optimizer.momentum=0.5"], "optimizer.momentum is of optimizer.kind = sgd alone"),
        (["schedule.gamma=0.5"], "schedule.gamma is of schedule.kind = steps alone, but that is cosine"),
        (["schedule.milestones=[3]"], "schedule.milestones is of"),
        (["schedule.kind=steps", "schedule.final_factor=0.1"], "schedule.final_factor is of schedule.kind = cosine alone"),
    ],
)
def test_override_that_would_change_nothing_is_refused(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolve_config(data="digits", overrides=overrides)


def test_words_of_scripts_that_say_what_is_so_anyway_and_files_made_for_another_choice_are_taken() -> None:
    resolve_config(data="digits", overrides=["model.arch=resnext", "model.widen_factor=4"])
    resolve_config(data="digits", overrides=["model.dropout=0", "optimizer.kind=adamw", "optimizer.momentum=0.9"])
    assert resolve_config("cifar10-wrn28-10", overrides=["schedule.kind=cosine"]).schedule.gamma == 0.2


def test_data_bring_their_configuration() -> None:
    assert [default_name(data) for data in (None, "digits", "cifar100", "synthetic")] == ["digits", "digits", "cifar100", "cifar10"]
    assert resolve_config(data="digits", overrides=["epochs=2"]) == replace(NAMED["digits"], epochs=2)
