"""What a run consists of while it trains: model, optimizer, schedule, averages, position in the text; one update; saving and restoring it all."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torch import Tensor

from hora.comm.randomness import seed_torch
from hora.comm.session import session
from hora.data.steps import Step
from hora.errors import ConfigError
from hora.plan.seeds import derive_key, seed_at
from hora.recipes.meter import RunningTally, Tally
from hora.recipes.nmt.config import NmtConfig, TrainingConfig
from hora.recipes.nmt.corpus import Corpus
from hora.recipes.nmt.loss import Normalization, loss_sums
from hora.recipes.nmt.models import TranslationModel, build_model
from hora.recipes.nmt.stream import PairStream
from hora.recipes.nmt.updates import make_optimizer, make_plateau, make_schedule
from hora.recipes.sameness import require_same
from hora.recipes.stepping import StepMaker, make_train_step
from hora.sync.optimizer import DistributedOptimizer
from hora.train.averages import WeightAverage
from hora.train.step.train_step import TrainStep


class Trainer:
    """One run, from its beginning or from a checkpoint.

    Collective: all ranks make it and call its methods in the same order.

    Attributes:
        step: updates done.
        plateau: the schedule `loss`, which looks at validations.
        average: of the weights, if one is wanted.
    """

    def __init__(self, config: NmtConfig, corpus: Corpus, make_step: StepMaker = make_train_step) -> None:
        device, training = session().device, config.training_configs
        self._config = config
        vocabularies = corpus.vocabularies
        if config.model_configs.tie_source_target_embedding and not vocabularies.shared:
            raise ConfigError(
                "tie_source_target_embedding needs one vocabulary for both sides, but they have two; give a single one in data_configs.vocabularies"
            )
        sizes = len(vocabularies.source), len(vocabularies.target)
        self.model: TranslationModel = build_model(config.model_configs, *sizes, seed=training.seed).to(device)
        _require_places(self.model, corpus, training)
        self.train_step: TrainStep = make_step(
            self.model,
            self._loss,
            make_optimizer(config.optimizer_configs, self.model),
            strategy=training.strategy,
            clip_norm=config.optimizer_configs.grad_clip if config.optimizer_configs.grad_clip > 0 else None,
            precision=training.precision,
            compile=training.compile,
            capture=training.capture,
        )
        self.stream = PairStream(
            corpus.texts["train"],
            corpus.digest,
            batch_size=training.batch_size,
            update_cycle=training.update_cycle,
            key=training.batching_key,
            use_bucket=training.use_bucket,
            shuffle=training.shuffle,
            seed=training.seed,
        )
        total_steps = training.max_steps or training.max_epochs * len(self.stream)
        self._factor = make_schedule(config.optimizer_configs, d_model=config.model_configs.d_model, total_steps=total_steps)
        self.plateau = make_plateau(config.optimizer_configs)
        self.average = _make_average(training, self.model)
        self._normalization: Normalization = "means" if training.norm_by_words else training.normalize
        self._pending = RunningTally(device)
        self.step = 0
        self._dropout_key = derive_key("nmt dropout", training.seed, session().rank)

    @property
    def optimizer(self) -> DistributedOptimizer:
        """What makes the updates."""
        return self.train_step.optimizer

    @property
    def lr(self) -> float:
        """Learning rate of the last update."""
        return float(self.optimizer.param_groups[0]["lr"])

    def size_bytes(self) -> int:
        """About as many bytes as a checkpoint has."""
        return (4 if self.average else 3) * sum(parameter.nbytes for parameter in self.model.parameters())

    def update(self, step: Step) -> int:
        """Trains on one global batch; returns how many tokens of the target it has."""
        self._set_lr()
        # Dropout draws from the global generators: seeded by rank and step (in exact mode by the optimizer), they need not be saved.
        seed_torch(seed_at(self._dropout_key, self.step))
        result = self.train_step(step)
        num_tokens = self.stream.num_target_tokens(step)
        self._pending.add(result.metrics["nll"], num_tokens)
        self.step += 1
        if self.average is not None and step.epoch >= self._config.training_configs.moving_average_start_epoch:
            self.average.update()
        return num_tokens

    def _loss(self, model: TranslationModel, batch: tuple[Tensor, Tensor], state: None) -> tuple[Tensor, Tensor, dict[str, Tensor], None]:
        source, target = batch
        logits = model(source, target[:, :-1].contiguous())  # whose strides a compiler need not look at
        sums = loss_sums(
            logits, target[:, 1:], label_smoothing=self._config.model_configs.label_smoothing, normalization=self._normalization
        )
        return sums.loss, sums.weight, {"nll": sums.nll}, state

    def collect(self) -> Tally:
        """Training loss over all ranks since the last time, without label smoothing.

        Raises:
            NonFiniteGradient: the last update was left out: names its parameters.
            NonFiniteLoss: a loss was not finite.
        """
        self.optimizer.settle_checks()
        tally = self._pending.read()
        self._pending.reset()
        return tally

    @contextmanager
    def averaged(self) -> Iterator[TranslationModel]:
        """Inside the `with` block the model has its averaged weights, if they are wanted."""
        if self.average is None:
            yield self.model
            return
        with self.average.swapped_in():
            yield self.model

    def _set_lr(self) -> None:
        factor = self._factor(self.step) * (self.plateau.factor if self.plateau else 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self._config.optimizer_configs.learning_rate * factor

    # Saving and restoring -----------------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that another start of the run needs, on any number of ranks. `average` has the averaged weights under `weights`, if there are any.

        Raises:
            NonFiniteGradient, NonFiniteLoss: the model is spoilt and not worth keeping.
        """
        self.optimizer.settle_checks()
        pending = self._pending.read()
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "train_step": self.train_step.state_dict(),
            "progress": {
                "step": self.step,
                "stream": self.stream.state_dict(),
                "settings": self._settings(),
                "plateau": self.plateau.state_dict() if self.plateau else None,
                "pending_tally": [pending.nll, pending.tokens],
            },
        }
        return state if self.average is None else {**state, "average": self.average.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken.

        Raises:
            CheckpointMismatch: the texts, their order or the model are not those of the checkpoint.
        """
        progress = state["progress"]
        require_same("settings", "the configuration of the run", self._settings(), progress["settings"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.stream.load_state_dict(progress["stream"])
        self.train_step.load_state_dict(state["train_step"])
        if self.plateau is not None and progress["plateau"] is not None:
            self.plateau.load_state_dict(progress["plateau"])
        if self.average is not None and "average" in state:
            self.average.load_state_dict(state["average"])
        self._pending.reset(Tally(*progress["pending_tally"]))
        self.step = progress["step"]

    def _settings(self) -> dict[str, Any]:
        """What a run keeps from its beginning to its end."""
        training = self._config.training_configs
        free = ("dropout", "attention_dropout", "activation_dropout", "label_smoothing")
        model = {f"model_configs.{name}": value for name, value in asdict(self._config.model_configs).items() if name not in free}
        exact = {"exact": training.exact, "logical_ranks": training.logical_ranks if training.exact else None}
        return {"seed": training.seed, "optimizer": self._config.optimizer_configs.optimizer, **exact, **model}


def _require_places(model: TranslationModel, corpus: Corpus, training: TrainingConfig) -> None:
    longest = 1 + max(int(side.lengths.max()) for text in corpus.texts.values() for side in (text.source, text.target))
    needed = max(longest, training.bleu_valid_configs.max_steps if training.bleu_valid_freq > 0 else 0)
    if needed > model.most_places:
        raise ConfigError(
            f"a model with learned places reads and writes up to {model.most_places} symbols, but the longest sentence has {longest}, its end "
            f"counted in, and bleu_valid_configs.max_steps is {training.bleu_valid_configs.max_steps}; set model_configs.positional_embedding to "
            "sin, or leave out what is longer"
        )


def _make_average(training: TrainingConfig, model: TranslationModel) -> WeightAverage | None:
    if training.moving_average_method is None:
        return None
    return WeightAverage(model, None if training.moving_average_method == "sma" else training.moving_average_alpha)
