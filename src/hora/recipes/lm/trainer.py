"""What a run consists of while it trains: model, optimizer, position in the text, hidden state, sums; one update; saving and restoring it all."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from hora.comm.collectives import all_gather
from hora.comm.randomness import seed_torch
from hora.comm.session import session
from hora.data.steps import Step
from hora.data.streams import TextStream
from hora.plan.seeds import derive_key, seed_at
from hora.recipes.lm.carry import by_row, from_rows, initial_states
from hora.recipes.lm.config import LmConfig, OptimizerConfig
from hora.recipes.lm.data import Corpus
from hora.recipes.lm.model import LanguageModel, State, build_model, nll_sum
from hora.recipes.meter import RunningTally, Tally
from hora.recipes.sameness import require_same
from hora.recipes.stepping import StepMaker, make_train_step
from hora.sync.optimizer import DistributedOptimizer
from hora.train.schedules import decay_after_epoch, warmup_cosine
from hora.train.step.train_step import TrainStep


class Trainer:
    """One run, from its beginning or from a checkpoint.

    Collective: all ranks make it and call its methods in the same order.

    Attributes:
        step: updates done.
        epoch_tally: training loss since the epoch began, over all ranks, as far as it has been collected.
    """

    def __init__(self, config: LmConfig, corpus: Corpus, make_step: StepMaker = make_train_step) -> None:
        device = session().device
        self._config = config
        self._digests = corpus.digests()
        self.model = build_model(config.model, vocabulary_size=len(corpus.vocabulary), window=config.data.window, seed=config.seed).to(
            device
        )
        self.train_step: TrainStep = make_step(
            self.model,
            self._loss,
            _make_optimizer(config.optimizer, self.model),
            strategy=config.strategy,
            clip_norm=config.optimizer.clip_norm,
            precision=config.precision,
            compile=config.compile,
            capture=config.capture,
        )
        self.stream = TextStream(
            corpus.tokens["train"],
            global_batch_size=config.data.rows,
            window=config.data.window,
            micro_batch_size=config.data.micro_batch_size,
        )
        self._pending = RunningTally(device)
        self.epoch_tally = Tally()
        self.step = 0
        self._dropout_key = derive_key("lm dropout", config.seed, session().rank)

    @property
    def optimizer(self) -> DistributedOptimizer:
        """What makes the updates."""
        return self.train_step.optimizer

    @property
    def lr(self) -> float:
        """Learning rate of the last update."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return self._config.data.rows * self._config.data.window

    def size_bytes(self) -> int:
        """About as many bytes as a checkpoint has."""
        optimizer = self._config.optimizer
        copies = 3 if optimizer.kind == "adamw" else 2 if optimizer.momentum else 1
        return copies * sum(parameter.nbytes for parameter in self.model.parameters())

    def update(self, step: Step) -> None:
        """Trains on one global batch."""
        if step.index == 0:
            self.train_step.states = initial_states(self.model, self.stream.micro_batches)
            self.epoch_tally = Tally()
        self._set_lr(step.epoch)
        # Dropout draws from the global generators: seeded by rank and step (in exact mode by the optimizer), they need not be saved.
        seed_torch(seed_at(self._dropout_key, self.step))
        result = self.train_step(step)
        self._pending.add(result.metrics["nll"], self.tokens_per_step)
        self.step += 1

    def _loss(self, model: LanguageModel, batch: tuple[Tensor, Tensor], state: State) -> tuple[Tensor, int, dict[str, Tensor], State]:
        inputs, targets = batch
        logits, state = model(inputs, state)
        loss_sum = nll_sum(logits, targets)
        weight = len(targets) if self._config.optimizer.normalize == "rows" else targets.numel()
        return loss_sum, weight, {"nll": loss_sum}, tuple(tensor.float() for tensor in state)

    def collect(self) -> Tally:
        """Training loss over all ranks since the last time.

        Raises:
            NonFiniteGradient: the last update was left out: names its parameters.
            NonFiniteLoss: a loss was not finite.
        """
        self.optimizer.settle_checks()
        tally = self._pending.read()
        self._pending.reset()
        self.epoch_tally += tally
        return tally

    def _set_lr(self, epoch: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self._config.optimizer.lr * self._lr_factor(epoch)

    def _lr_factor(self, epoch: int) -> float:
        schedule = self._config.schedule
        if schedule.kind == "epochs":
            return decay_after_epoch(epoch, decay=schedule.decay, last_full_epoch=schedule.last_full_epoch)
        return warmup_cosine(
            self.step,
            warmup_steps=schedule.warmup_steps,
            total_steps=self._config.epochs * len(self.stream),
            final_factor=schedule.final_factor,
        )

    # Saving and restoring -----------------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that another start of the run needs, on any number of ranks.

        Raises:
            NonFiniteGradient, NonFiniteLoss: the model is spoilt and not worth keeping.
        """
        self.optimizer.settle_checks()
        pending = self._pending.read()
        hidden = by_row(self.train_step.states, self.stream.micro_batches, self.model.device)
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "train_step": self.train_step.state_dict(),
            "progress": {
                "step": self.step,
                "stream": self.stream.state_dict(),
                "digests": self._digests,
                "settings": self._settings(),
                "epoch_tally": [self.epoch_tally.nll, self.epoch_tally.tokens],
                "pending_tally": [pending.nll, pending.tokens],
                "hidden": torch.cat(all_gather(hidden)),
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken.

        Raises:
            CheckpointMismatch: the texts, their order or the model are not those of the checkpoint.
        """
        progress = state["progress"]
        require_same("data", "the same --data and data.* settings", self._digests, progress["digests"])
        require_same("settings", "the configuration of the run", self._settings(), progress["settings"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.stream.load_state_dict(progress["stream"])
        self.train_step.load_state_dict(state["train_step"])
        rows = self.stream.rows
        self.train_step.states = from_rows(progress["hidden"][rows.start : rows.stop], self.stream.micro_batches, self.model)
        self.epoch_tally = Tally(*progress["epoch_tally"])
        self._pending.reset(Tally(*progress["pending_tally"]))
        self.step = progress["step"]

    def _settings(self) -> dict[str, Any]:
        """What a run keeps from its beginning to its end."""
        model = {f"model.{name}": value for name, value in asdict(self._config.model).items()}
        exact = {"exact": self._config.exact, "logical_ranks": self._config.logical_ranks if self._config.exact else None}
        return {"seed": self._config.seed, "optimizer.kind": self._config.optimizer.kind, **exact, **model}


def _make_optimizer(config: OptimizerConfig, model: LanguageModel) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.kind == "sgd":
        return torch.optim.SGD(parameters, config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    return torch.optim.AdamW(parameters, config.lr, weight_decay=config.weight_decay)
