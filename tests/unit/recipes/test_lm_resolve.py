from pathlib import Path

import pytest

from hora.errors import ConfigError
from hora.recipes.lm.config import NAMED
from hora.recipes.lm.resolve import resolve_config, run_name
from hora.train.config import dump_config


def test_small_is_the_default() -> None:
    assert resolve_config() == NAMED["small"]


@pytest.mark.parametrize("name", NAMED)
def test_named_configuration_is_found(name: str) -> None:
    assert resolve_config(name) == NAMED[name]


def test_texar_spelling_is_understood() -> None:
    assert resolve_config("config_medium") == NAMED["medium"]


def test_file_fills_up_with_the_values_of_small(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("epochs: 2\nmodel: {hidden_size: 8}\noptimizer: {lr: 1e-1}\n")
    config = resolve_config(str(tmp_path / "mine.yaml"))
    assert (config.epochs, config.model.hidden_size, config.optimizer.lr, config.data.rows) == (2, 8, 0.1, 20)


def test_overrides_win_over_the_name_and_the_data_option() -> None:
    config = resolve_config("medium", "/texts", ["epochs=3", "data.path=/others"])
    assert (config.epochs, config.data.path, config.model.hidden_size) == (3, "/others", 650)


@pytest.mark.parametrize("name", ["excerpt", "wikitext-2"])
def test_names_of_data_stay_names(name: str) -> None:
    assert resolve_config(data=name).data.path == name


def test_data_directory_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_config(data="it's: here").data.path == str(tmp_path / "it's: here")


def test_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean medium"):
        resolve_config("medum")


def test_resumed_run_keeps_its_configuration_unless_another_is_given(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(NAMED["demo"]))
    assert resolve_config(resume_from=tmp_path) == NAMED["demo"]
    assert resolve_config(overrides=["epochs=9"], resume_from=tmp_path).epochs == 9
    assert resolve_config("medium", resume_from=tmp_path) == NAMED["medium"]


@pytest.mark.parametrize(("config", "name"), [(None, "small"), ("config_large", "large"), ("a/mine.yaml", "mine")])
def test_run_is_named_after_its_configuration(config: str | None, name: str) -> None:
    assert run_name(config) == name
