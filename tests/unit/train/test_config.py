import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from hora.errors import ConfigError
from hora.train.config import dump_config, load_config


@dataclass(frozen=True)
class Optimizer:
    lr: Annotated[float, Field(gt=0)]
    name: Literal["sgd", "adamw"] = "sgd"
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        if self.name == "sgd" and self.lr > 100:
            raise ValueError("SGD diverges above lr = 100")


@dataclass(frozen=True)
class Stage:
    epochs: Annotated[int, Field(ge=1, le=10)]
    lr: float | None = None


@dataclass(frozen=True)
class Config:
    optimizer: Optimizer
    seed: int = 1
    shuffle: bool = True
    data: Path = Path("data")
    limit: int | None = None
    width: int | Literal["auto"] = "auto"
    stages: list[Stage] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def _problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(Config, _write(tmp_path, text), overrides)
    lines = str(caught.value).splitlines()
    return [line.strip().removeprefix(f"{tmp_path}/") for line in (lines[1:] if len(lines) > 1 else lines)]


def test_defaults_file_and_overrides_are_laid_over_each_other(tmp_path):
    path = _write(tmp_path, "optimizer: {lr: 0.5}\nseed: 2\n")
    defaults = {"optimizer": {"lr": 1.0, "name": "adamw"}, "seed": 3, "limit": 4}
    config = load_config(Config, path, ["seed=5", "optimizer.betas=[0.8, 1]"], defaults)
    assert config == Config(Optimizer(0.5, "adamw", (0.8, 1.0)), seed=5, limit=4)


def test_values_take_the_types_of_their_annotations(tmp_path):
    text = "optimizer: {lr: 1e-4}\ndata: no\nlimit: null\nwidth: 3\nstages: [{epochs: 1}, {epochs: 2, lr: 1}]\nweights: {a: 1, '2': .inf}\n"
    config = load_config(Config, _write(tmp_path, text))
    assert config.optimizer.lr == 1e-4
    assert config.data == Path("no")
    assert config.limit is None
    assert config.stages == [Stage(1), Stage(2, 1.0)]
    assert config.weights == {"a": 1.0, "2": math.inf}


def test_an_empty_file_leaves_the_defaults(tmp_path):
    assert load_config(Config, _write(tmp_path, "# nothing\n"), defaults={"optimizer": {"lr": 1}}) == Config(Optimizer(1.0))


def test_no_file_is_needed():
    assert load_config(Config, None, ["optimizer.lr=2"]) == Config(Optimizer(2.0))


def test_defaults_are_not_changed():
    defaults = {"optimizer": {"lr": 1}}
    load_config(Config, None, ["optimizer.lr=2", "optimizer.name=adamw"], defaults)
    assert defaults == {"optimizer": {"lr": 1}}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seed: 1", "config.yaml:1:1: `optimizer` is missing"),
        ("optimizer: {}", "config.yaml:1:1: `optimizer.lr` is missing"),
        ("optimizer:\n  lr: '1'", 'config.yaml:2:3: `optimizer.lr` must be a valid number, but is "1" instead'),
        ("optimizer: {lr: true}", "config.yaml:1:13: `optimizer.lr` must be a valid number, but is true instead"),
        ("optimizer: {lr: 0}", "config.yaml:1:13: `optimizer.lr` must be greater than 0, but is 0 instead"),
        ("optimizer: 3", "config.yaml:1:1: `optimizer` must be a mapping, but is 3 instead"),
        ("optimizer: {lr: 200}", "config.yaml:1:1: `optimizer`: SGD diverges above lr = 100"),
        (
            "optimizer: {lr: 1, name: adam}",
            "config.yaml:1:20: `optimizer.name` must be 'sgd' or 'adamw', but is \"adam\" instead; did you mean 'adamw'?",
        ),
        ("optimizer: {lr: 1, betas: [1]}", "config.yaml:1:20: `optimizer.betas[1]` is missing"),
        ("optimizer: {lr: 1}\nseed: true", "config.yaml:2:1: `seed` must be a valid integer, but is true instead"),
        ("optimizer: {lr: 1}\nseed: 1.0", "config.yaml:2:1: `seed` must be a valid integer, but is 1.0 instead"),
        ("optimizer: {lr: 1}\nshuffle: no", 'config.yaml:2:1: `shuffle` must be a valid boolean, but is "no" instead'),
        ("optimizer: {lr: 1}\nshuffle: 1", "config.yaml:2:1: `shuffle` must be a valid boolean, but is 1 instead"),
        ("optimizer: {lr: 1}\nwidth: 1.5", "config.yaml:2:1: `width` must be a valid integer or be 'auto', but is 1.5 instead"),
        (
            "optimizer: {lr: 1}\nstages:\n- epochs: 1\n- epochs: 11\n",
            "config.yaml:4:3: `stages[1].epochs` must be less than or equal to 10, but is 11 instead",
        ),
        ("optimizer: {lr: 1}\nstages:\n- {epochs: 1}\n- {lr: 1}\n", "config.yaml:4:3: `stages[1].epochs` is missing"),
        ("optimizer: {lr: 1}\nsede: 1", "config.yaml:2:1: unknown key `sede`; did you mean `seed`?"),
        ("optimizer: {lr: 1, nmae: sgd}", "config.yaml:1:20: unknown key `optimizer.nmae`; did you mean `optimizer.name`?"),
        ("optimizer: {lr: 1}\nname: sgd", "config.yaml:2:1: unknown key `name`; did you mean `optimizer.name`?"),
        ("optimizer: {lr: 1, zzz: 1}", "config.yaml:1:20: unknown key `optimizer.zzz`; known here: betas, lr, name"),
        ("optimizer: {lr: 1}\nstages: [{epochs: 1, epoch: 2}]", "config.yaml:2:22: unknown key `stages[0].epoch`; did you mean `stages[0].epochs`?"),
        ("optimizer: {lr: 1}\nseed: 1\nseed: 2", "config.yaml:3:1: duplicate key `seed`; it stands at config.yaml:2:1 already"),
        ("- 1", "config.yaml:1:1: a configuration must be a mapping of keys to values, but is [1] instead"),
        ("a: [", "config.yaml:1:5: this is no YAML: expected the node content, but found '<stream end>'"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_named_with_its_place(tmp_path, text, problem):
    assert _problems(tmp_path, text) == [problem.replace("at config", f"at {tmp_path}/config")]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("optimizer.lr", "--set optimizer.lr: an override must read key.key=value"),
        ("optimizer..lr=1", "--set optimizer..lr=1: an override must read key.key=value"),
        ("=1", "--set =1: an override must read key.key=value"),
        ("optimizer.lr=x", '--set optimizer.lr=x: `optimizer.lr` must be a valid number, but is "x" instead'),
        ("optimzer.lr=1", "--set optimzer.lr=1: unknown key `optimzer`; did you mean `optimizer`?"),
        ("seed.x=1", '--set seed.x=1: `seed` must be a valid integer, but is {"x": 1} instead'),
        ("seed=[1", "--set seed=[1: this is no YAML: expected ',' or ']', but got '<stream end>'"),
        ("seed=!!int 3", "--set seed=!!int 3: tags are not allowed, but here is tag:yaml.org,2002:int; write the plain value"),
        ("seed=", "--set seed=: `seed` must be a valid integer, but is null instead"),
    ],
)
def test_a_mistake_in_an_override_is_named_with_the_override(tmp_path, override, problem):
    assert _problems(tmp_path, "optimizer: {lr: 1}", override) == [problem]


def test_values_that_do_not_go_together_are_placed_where_they_were_given_and_not_in_the_defaults():
    with pytest.raises(ConfigError) as told:
        load_config(Config, overrides=["optimizer.lr=200"], defaults={"optimizer": {"lr": 1, "name": "sgd"}})
    assert str(told.value) == "--set optimizer.lr=200: `optimizer`: SGD diverges above lr = 100"
    with pytest.raises(ConfigError, match="^the defaults: `optimizer`: SGD diverges"):
        load_config(Config, defaults={"optimizer": {"lr": 200}})


def test_all_problems_are_reported_at_once(tmp_path):
    text = "optimiser: {lr: 1}\nseed: x\nseed: 2\nstages: [{epochs: 0}]\n"
    assert _problems(tmp_path, text, "limit=a", "shuffle") == [
        f"config.yaml:3:1: duplicate key `seed`; it stands at {tmp_path}/config.yaml:2:1 already",
        "--set shuffle: an override must read key.key=value",
        "config.yaml:1:1: `optimizer` is missing",
        'config.yaml:2:1: `seed` must be a valid integer, but is "x" instead',
        '--set limit=a: `limit` must be a valid integer, but is "a" instead',
        "config.yaml:4:11: `stages[0].epochs` must be greater than or equal to 1, but is 0 instead",
        "config.yaml:1:1: unknown key `optimiser`; did you mean `optimizer`?",
    ]


def test_the_number_of_problems_comes_first(tmp_path):
    with pytest.raises(ConfigError, match=r"^the configuration has 2 problems:\n  "):
        load_config(Config, _write(tmp_path, "sede: 1"))


def test_an_absent_file_is_the_only_problem_reported(tmp_path):
    with pytest.raises(ConfigError, match=r"^\S+absent.yaml: the configuration file cannot be read: No such file or directory$"):
        load_config(Config, tmp_path / "absent.yaml")


def test_a_file_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes("data: é".encode("latin-1"))
    with pytest.raises(ConfigError, match="it is not UTF-8"):
        load_config(Config, path)


@pytest.mark.parametrize(
    "config",
    [
        Config(Optimizer(1e-5)),
        Config(
            Optimizer(1.0, "adamw", (0.0, 1.0)), 2**63, False, Path("/no"), 3, 4, [Stage(1), Stage(2, 1e300)], {"1": 1.0, "on": -math.inf}
        ),
        Config(Optimizer(0.1), data=Path("a: b #c"), weights={"": 0.1, "é\n": 1 / 3}),
    ],
)
def test_a_dumped_configuration_loads_back_equal(tmp_path, config):
    assert load_config(Config, _write(tmp_path, dump_config(config))) == config
