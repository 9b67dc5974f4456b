"""What is trained: the trainer of a recipe with its data, and what is asked of it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from hora.compare.kinds import KINDS
from hora.recipes.meter import Tally
from hora.recipes.stepping import StepMaker


class Subject(ABC):
    """A recipe with its data, which are read once and trained on by all variants.

    Collective: all ranks make it and call its methods.
    """

    def __init__(self, recipe: str, config: Any) -> None:
        self.kind, self.config = KINDS[recipe], config

    @abstractmethod
    def trainer(self, config: Any, make_step: StepMaker) -> Any:
        """A new trainer, at the beginning of its data, with the weights that the seed gives."""

    def steps(self, trainer: Any) -> Any:
        """The loader whose steps it is trained on, epoch after epoch."""
        return trainer.stream

    def tally(self, trainer: Any) -> Tally:
        """Training loss since the last time; of a plain step this rank's."""
        tally: Tally = trainer.collect()
        return tally

    @abstractmethod
    def evaluate(self, trainer: Any) -> tuple[float, float]:
        """Loss and quality on data that are not trained on, exact over any number of ranks."""


class _Image(Subject):
    def __init__(self, recipe: str, config: Any) -> None:
        from hora.recipes.image.data import load_images

        super().__init__(recipe, config)
        self._images = load_images(config.data, config.seed)

    @override
    def trainer(self, config: Any, make_step: StepMaker) -> Any:
        from hora.recipes.image.trainer import Trainer

        return Trainer(config, self._images, make_step)

    @override
    def steps(self, trainer: Any) -> Any:
        return trainer.loader

    @override
    def tally(self, trainer: Any) -> Tally:
        tally: Tally = trainer.collect().tally
        return tally

    @override
    def evaluate(self, trainer: Any) -> tuple[float, float]:
        score = trainer.evaluate()
        return score.loss, score.top1


class _Lm(Subject):
    def __init__(self, recipe: str, config: Any) -> None:
        from hora.recipes.lm.data import load_corpus

        super().__init__(recipe, config)
        self._corpus = load_corpus(config.data)

    @override
    def trainer(self, config: Any, make_step: StepMaker) -> Any:
        from hora.recipes.lm.trainer import Trainer

        return Trainer(config, self._corpus, make_step)

    @override
    def evaluate(self, trainer: Any) -> tuple[float, float]:
        from hora.recipes.lm.evaluation import evaluate

        tally = evaluate(trainer.model, self._corpus.tokens["valid"], self.config.data)
        return tally.loss, tally.perplexity


class _Nmt(Subject):
    def __init__(self, recipe: str, config: Any) -> None:
        from hora.recipes.nmt.corpus import load_corpus

        super().__init__(recipe, config)
        self._corpus = load_corpus(config.data_configs, None)

    @override
    def trainer(self, config: Any, make_step: StepMaker) -> Any:
        from hora.recipes.nmt.trainer import Trainer

        return Trainer(config, self._corpus, make_step)

    @override
    def evaluate(self, trainer: Any) -> tuple[float, float]:
        from hora.recipes.nmt.evaluation import evaluate
        from hora.recipes.nmt.stream import PairStream

        training = self.config.training_configs
        stream = PairStream(self._corpus.texts["valid"], self._corpus.digest, batch_size=training.valid_batch_size, shuffle=False)
        with trainer.averaged() as model:
            tally = evaluate(model, stream, precision=training.precision)
        return tally.loss, tally.perplexity


_SUBJECTS: dict[str, type[Subject]] = {"image": _Image, "lm": _Lm, "nmt": _Nmt}


def load(recipe: str, words: tuple[str | None, str | None, Sequence[str]], *, dropout: bool) -> Subject:
    """The recipe that the words of its command describe, with its data. Collective."""
    config = KINDS[recipe].resolve(*words)
    return _SUBJECTS[recipe](recipe, config if dropout else KINDS[recipe].without_dropout(config))
