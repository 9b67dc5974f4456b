import pytest
import torch

from hora.errors import ConfigError
from hora.recipes.nmt.config import OptimizerConfig, ScheduleConfig
from hora.recipes.nmt.updates import make_optimizer, make_plateau, make_schedule


@pytest.mark.parametrize("name", ["adam", "adamw", "adafactor", "sgd", "adadelta", "adagrad", "rmsprop", "asgd", "rprop"])
def test_every_optimizer_updates(name):
    model = torch.nn.Linear(3, 2)
    before = model.weight.clone()
    optimizer = make_optimizer(OptimizerConfig(name, 0.1), model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert type(optimizer).__name__.lower() == name


def test_arguments_reach_the_optimizer():
    config = OptimizerConfig("adam", 0.1, optimizer_params={"betas": [0.5, 0.6], "eps": 1e-3})
    (group,) = make_optimizer(config, torch.nn.Linear(1, 1)).param_groups
    assert (group["betas"], group["eps"]) == ((0.5, 0.6), 1e-3)


@pytest.mark.parametrize(
    ("params", "fault"),
    [({"beta": [0.5, 0.6]}, "adam has no beta; did you mean betas"), ({"betas": [2, 3]}, "Invalid beta"), ({"betas": 1}, "adam")],
)
def test_wrong_arguments_are_told(params, fault):
    with pytest.raises(ConfigError, match=fault):
        make_optimizer(OptimizerConfig("adam", optimizer_params=params), torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("method", "settings", "expected"),
    [
        (None, {}, [2.0, 2.0, 2.0]),
        ("linear", {"min_lr": 0.5}, [2.0, 1.25, 0.5]),
        ("linear", {"decay_steps": 50, "min_lr": 0.5}, [2.0, 0.5, 0.5]),
        ("cosine", {"warmup_steps": 0, "min_lr": 1.0}, [2.0, 1.492, 1.0]),
        ("isqrt", {"warmup_steps": 1, "decay_steps": 51}, [2.0, 2.0, 2.0 * (51 / 101) ** 0.5]),
        ("isqrt", {"warmup_steps": 1, "decay_steps": 1, "min_lr": 1.5}, [2.0, 1.5, 1.5]),
        ("noam", {"warmup_steps": 1, "d_model": 100}, [2.0, 2 * 51**-0.5, 2 * 101**-0.5]),
        ("noam", {"warmup_steps": 1}, [1.0, 51**-0.5, 101**-0.5]),
    ],
)
def test_schedules_have_the_numbers_of_the_configuration(method, settings, expected):
    config = OptimizerConfig(learning_rate=2.0, schedule_method=method, scheduler_configs=ScheduleConfig(**settings))
    factor = make_schedule(config, d_model=400, total_steps=100)
    assert [2.0 * factor(step) for step in (0, 50, 100)] == pytest.approx(expected, abs=1e-3)


def test_plateau_belongs_to_the_schedule_loss():
    assert make_plateau(OptimizerConfig(schedule_method="noam")) is None
    plateau = make_plateau(
        OptimizerConfig(learning_rate=2.0, schedule_method="loss", scheduler_configs=ScheduleConfig(scale=0.1, min_lr=1.0))
    )
    for _ in range(3):
        plateau.update(1.0)
    assert plateau.factor == 0.5
