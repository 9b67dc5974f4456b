"""What each recipe is before anything is started: its configuration, what must hold of it, and what must be there. Loads no torch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from hora.errors import ConfigError


class Kind(ABC):
    """A recipe whose ways to train are compared.

    Attributes:
        quality: what its evaluation tells besides the loss.
    """

    quality: str
    _settings = ""

    @abstractmethod
    def resolve(self, config: str | None, data: str | None, overrides: Sequence[str]) -> Any:
        """The configuration, from the words that `hora train` takes; by default one for data that come with Hora.

        Raises:
            ConfigError: something in it is wrong.
        """

    @abstractmethod
    def name(self, config: str | None, data: str | None) -> str:
        """What the configuration is called."""

    @abstractmethod
    def without_dropout(self, config: Any) -> Any:
        """The same without dropout, which draws other numbers on each rank, so that no two ways to train would have the same losses."""

    def normalises_apart(self, config: Any) -> bool:  # noqa: ARG002
        """Whether layers normalise over the samples of a rank, so that each number of ranks trains another model."""
        return False

    @abstractmethod
    def with_way(self, config: Any, *, strategy: str, capture: bool) -> Any:
        """The same with another strategy."""

    @abstractmethod
    def training(self, config: Any) -> Any:
        """The part of the configuration that says how it is trained: precision, exact mode and such."""

    def check(self, config: Any, ranks: int) -> None:
        """Looks for what the ranks will need.

        Raises:
            ConfigError: it is not there, or this configuration cannot be compared.
        """
        training = self.training(config)
        if training.exact:
            raise ConfigError(f"exact mode is Hora's alone, so there is nothing to compare it with; leave out {self._settings}exact")
        if training.precision == "float16":
            raise ConfigError(f"plain loops have no loss scale, so {self._settings}precision must be float32 or bfloat16, but is float16")
        self.locate(config, ranks)

    @abstractmethod
    def locate(self, config: Any, ranks: int) -> None:
        """Looks for the data, and whether there is enough of it for so many ranks."""

    def carries_state(self, config: Any) -> bool:  # noqa: ARG002
        """Whether the model carries a state from one step to the next."""
        return False


class _Image(Kind):
    quality = "accuracy"

    @override
    def resolve(self, config: str | None, data: str | None, overrides: Sequence[str]) -> Any:
        from hora.recipes.image.resolve import resolve_config

        return resolve_config(config, data, overrides)

    @override
    def name(self, config: str | None, data: str | None) -> str:
        from hora.recipes.image.resolve import default_name

        return Path(config or default_name(data)).stem

    @override
    def without_dropout(self, config: Any) -> Any:
        return replace(config, model=replace(config.model, dropout=0.0))

    @override
    def normalises_apart(self, config: Any) -> bool:
        from hora.recipes.image.architectures import has_batch_norm

        return config.model.batch_norm == "local" and has_batch_norm(config.model.arch)

    @override
    def with_way(self, config: Any, *, strategy: str, capture: bool) -> Any:
        return replace(config, strategy=strategy, capture=capture)

    @override
    def training(self, config: Any) -> Any:
        return config

    @override
    def locate(self, config: Any, ranks: int) -> None:
        from hora.recipes.image.places import locate

        if ranks > config.data.global_batch_size:
            raise ConfigError(
                f"each rank must have work in a step, but {ranks} ranks are more than data.global_batch_size = {config.data.global_batch_size}"
            )
        locate(config.data.path)


class _Lm(Kind):
    quality = "perplexity"

    @override
    def resolve(self, config: str | None, data: str | None, overrides: Sequence[str]) -> Any:
        from hora.recipes.lm.resolve import resolve_config

        return resolve_config("demo" if config is None and data is None else config, data, overrides)

    @override
    def name(self, config: str | None, data: str | None) -> str:
        from hora.recipes.lm.resolve import run_name

        return run_name("demo" if config is None and data is None else config)

    @override
    def without_dropout(self, config: Any) -> Any:
        return replace(config, model=replace(config.model, keep_prob=1.0))

    @override
    def with_way(self, config: Any, *, strategy: str, capture: bool) -> Any:
        return replace(config, strategy=strategy, capture=capture)

    @override
    def training(self, config: Any) -> Any:
        return config

    @override
    def locate(self, config: Any, ranks: int) -> None:
        from hora.recipes.lm.text import locate

        if ranks > config.data.rows:
            raise ConfigError(f"each rank must have a row, but {ranks} ranks are more than data.rows = {config.data.rows}")
        locate(config.data.path)

    @override
    def carries_state(self, config: Any) -> bool:
        return bool(config.model.kind == "lstm")


class _Nmt(Kind):
    quality = "perplexity"
    _settings = "training_configs."

    @override
    def resolve(self, config: str | None, data: str | None, overrides: Sequence[str]) -> Any:
        from hora.recipes.nmt.resolve import resolve_config

        return resolve_config(self._config(config, data), None if data is None else Path(data), overrides)

    @override
    def name(self, config: str | None, data: str | None) -> str:
        return Path(self._config(config, data)).stem

    @staticmethod
    def _config(config: str | None, data: str | None) -> str:
        return config or ("demo" if data is None else "small")

    @override
    def without_dropout(self, config: Any) -> Any:
        return replace(config, model_configs=replace(config.model_configs, dropout=0.0, attention_dropout=None, activation_dropout=None))

    @override
    def with_way(self, config: Any, *, strategy: str, capture: bool) -> Any:
        return replace(config, training_configs=replace(config.training_configs, strategy=strategy, capture=capture))

    @override
    def training(self, config: Any) -> Any:
        return config.training_configs

    @override
    def locate(self, config: Any, ranks: int) -> None:
        from hora.recipes.nmt.resolve import require_files

        require_files(config)


KINDS: Final[dict[str, Kind]] = {"image": _Image(), "lm": _Lm(), "nmt": _Nmt()}
"""The recipes."""
