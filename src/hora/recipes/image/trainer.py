"""What a run consists of while it trains: model, optimizer, average, position in the images, sums; one update; saving and restoring it all."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hora.comm.randomness import seed_torch
from hora.comm.session import session
from hora.data.steps import Step
from hora.errors import CheckpointMismatch, ConfigError
from hora.plan.samples import deal
from hora.plan.seeds import derive_key, seed_at
from hora.recipes.image.augment import augment
from hora.recipes.image.config import ImageConfig, OptimizerConfig
from hora.recipes.image.data import Batch, ImageLoader, Images, SeededStep
from hora.recipes.image.evaluation import Preparation, evaluate
from hora.recipes.image.models import build_model
from hora.recipes.image.scores import Score, count_correct
from hora.recipes.meter import RunningTally, Tally
from hora.recipes.sameness import require_same
from hora.recipes.stepping import StepMaker, make_train_step
from hora.sync.batch_norm import SyncBatchNorm, convert_sync_batch_norm
from hora.sync.buffers import sync_buffers
from hora.sync.optimizer import DistributedOptimizer
from hora.train.averages import WeightAverage
from hora.train.schedules import step_decay, warmup, warmup_cosine
from hora.train.step.train_step import TrainStep
from hora.train.weights import differences


class Trainer:
    """One run, from its beginning or from a checkpoint.

    Collective: all ranks make it and call its methods in the same order.

    Attributes:
        step: updates done.
        epoch_score: of training since the epoch began, over all ranks, as far as it has been collected.
        average: of the weights, if one is wanted.
    """

    def __init__(self, config: ImageConfig, images: Images, make_step: StepMaker = make_train_step) -> None:
        device, facts = session().device, images.facts
        self._config, self._facts = config, facts
        self.model = make_model(config, images)
        self._prepare = Preparation(facts.mean, facts.deviation, channels_last=config.channels_last).to(device)
        self.train_step: TrainStep = make_step(
            self.model,
            self._loss,
            _make_optimizer(config, self.model),
            strategy=config.strategy,
            clip_norm=config.optimizer.clip_norm,
            precision=config.precision,
            compile=config.compile,
            capture=config.capture,
        )
        self.loader = ImageLoader(images, "train", config.data, training=True, seed=config.seed)
        self._eval_loaders = {
            split: ImageLoader(images, split, config.data, training=False, seed=config.seed) for split in images.sets if split != "train"
        }
        self._num_samples = len(images.sets["train"])  # type: ignore[arg-type]  # it has a length
        _require_even_shares(config, self.model, self._num_samples)
        self.average = None if config.ema_decay is None else WeightAverage(self.model, config.ema_decay)
        self._pending = RunningTally(device, "images")
        self._pending_correct = torch.zeros(2, dtype=torch.float64, device=device)
        self.epoch_score = Score()
        self.step = 0
        self._dropout_key = derive_key("image dropout", config.seed, session().rank)

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
        copies = (3 if self._config.optimizer.kind == "adamw" else 2) + (self.average is not None)
        return copies * sum(parameter.nbytes for parameter in self.model.parameters())

    def update(self, step: Step | SeededStep) -> int:
        """Trains on one global batch; returns how many images it has."""
        if step.index == 0:
            self.epoch_score = Score()
        self._set_lr(step.epoch)
        # Dropout draws from the global generators: seeded by rank and step (in exact mode by the optimizer), they need not be saved.
        seed_torch(seed_at(self._dropout_key, self.step))
        result = self.train_step(step)
        size = self._config.data.global_batch_size
        num_images = min(size, self._num_samples - step.index * size)
        self._pending.add(result.metrics["nll"], num_images)
        self._pending_correct += torch.stack((result.metrics["top1"], result.metrics["top5"]))
        self.step += 1
        if self.average is not None:
            self.average.update()
        return num_images

    def _loss(self, model: nn.Module, batch: Batch, state: None) -> tuple[Tensor, int, dict[str, Tensor], None]:
        images, labels, seeds = batch
        data = self._config.data
        if data.crop_padding or data.flip:
            images = augment(images, seeds, padding=data.crop_padding, flip=data.flip)
        logits = model(self._prepare(images)).float()
        loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=self._config.label_smoothing)
        nll = loss if not self._config.label_smoothing else F.cross_entropy(logits.detach(), labels, reduction="sum")
        top1, top5 = count_correct(logits.detach(), labels)
        return loss, len(labels), {"nll": nll, "top1": top1, "top5": top5}, state

    def collect(self) -> Score:
        """Training loss, without label smoothing, and accuracy over all ranks since the last time.

        Raises:
            NonFiniteGradient: the last update was left out: names its parameters.
            NonFiniteLoss: a loss was not finite.
        """
        self.optimizer.settle_checks()
        score = self._read()
        self._pending.reset()
        self._pending_correct.zero_()
        self.epoch_score += score
        return score

    @property
    def holds_out(self) -> bool:
        """Whether there are images that are neither trained nor tested on."""
        return "valid" in self._eval_loaders

    def evaluate(self, split: str = "test") -> Score:
        """Loss and accuracy on the images of a split, with the averaged weights if there are any. Collective."""
        sync_buffers(self.model)
        with self._averaged():
            return evaluate(self.model, self._prepare, self._eval_loaders[split], precision=self._config.precision)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        if self.average is None:
            yield
            return
        with self.average.swapped_in():
            yield

    def _read(self) -> Score:
        top1, top5 = self._pending_correct.tolist()
        return Score(self._pending.read(), int(top1), int(top5))

    def _set_lr(self, epoch: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self._config.lr * self._lr_factor(epoch)

    def _lr_factor(self, epoch: int) -> float:
        schedule, per_epoch = self._config.schedule, len(self.loader)
        warmup_steps = round(schedule.warmup_epochs * per_epoch)
        if schedule.kind == "steps":
            return warmup(self.step, warmup_steps=warmup_steps) * step_decay(epoch, milestones=schedule.milestones, gamma=schedule.gamma)
        return warmup_cosine(
            self.step, warmup_steps=warmup_steps, total_steps=self._config.epochs * per_epoch, final_factor=schedule.final_factor
        )

    # Saving and restoring -----------------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that another start of the run needs, on any number of ranks. Collective.

        Raises:
            NonFiniteGradient, NonFiniteLoss: the model is spoilt and not worth keeping.
        """
        self.optimizer.settle_checks()
        sync_buffers(self.model)
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "train_step": self.train_step.state_dict(),
            "progress": {
                "step": self.step,
                "loader": self.loader.loader.state_dict(),
                "digests": dict(self._facts.digests),
                "settings": self._settings(),
                "epoch_score": _numbers(self.epoch_score),
                "pending_score": _numbers(self._read()),
            },
        }
        return state if self.average is None else {**state, "average": self.average.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken.

        Raises:
            CheckpointMismatch: the images, their order or the model are not those of the checkpoint.
        """
        progress = state["progress"]
        require_same("settings", "the configuration of the run", self._settings(), progress["settings"])
        require_same("data", "the same --data and data.held_out", self._facts.digests, progress["digests"])
        self.restore_model(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.loader.load_state_dict(progress["loader"])
        self.train_step.load_state_dict(state["train_step"])
        self.epoch_score, pending = _score(progress["epoch_score"]), _score(progress["pending_score"])
        self._pending.reset(pending.tally)
        self._pending_correct.copy_(torch.tensor([pending.correct, pending.among_five]))
        self.step = progress["step"]

    def restore_model(self, state: Mapping[str, Any]) -> None:
        """Takes the weights, and their average if there is one, and nothing else.

        Raises:
            CheckpointMismatch: they are those of another model.
        """
        if problems := differences(state["model"], self.model.state_dict()):
            raise CheckpointMismatch(
                f"the weights of the checkpoint do not fit the model that the configuration and the images make: {'; '.join(problems)}"
            )
        self.model.load_state_dict(state["model"])
        if self.average is not None and "average" in state:
            self.average.load_state_dict(state["average"])

    def _settings(self) -> dict[str, Any]:
        """What a run keeps from its beginning to its end."""
        free = ("dropout",)
        model = {f"model.{name}": value for name, value in asdict(self._config.model).items() if name not in free}
        exact = {"exact": self._config.exact, "logical_ranks": self._config.logical_ranks if self._config.exact else None}
        return {
            "seed": self._config.seed,
            "optimizer.kind": self._config.optimizer.kind,
            "averaged": self.average is not None,
            **exact,
            **model,
        }


def make_model(config: ImageConfig, images: Images) -> nn.Module:
    """The network on the device, with BatchNorm as it is wanted."""
    facts = images.facts
    model = build_model(config.model, channels=facts.channels, size=facts.size, num_classes=facts.num_classes, seed=config.seed)
    if config.model.batch_norm == "sync" and not config.exact:
        model = convert_sync_batch_norm(model)
    model = model.to(session().device)
    if config.channels_last:
        layout: Any = {"memory_format": torch.channels_last}  # which torch's own annotations leave out
        model.to(**layout)
    return model


def _require_even_shares(config: ImageConfig, model: nn.Module, num_samples: int) -> None:
    """SyncBatchNorm is called by all ranks equally often, and none without an image."""
    if session().world_size == 1 or not any(isinstance(module, SyncBatchNorm) for module in model.modules()):
        return
    data = config.data
    rest = 0 if data.drop_last else num_samples % data.global_batch_size
    for size, what in ((min(data.global_batch_size, num_samples), "global batch"), (rest, "last global batch of an epoch")):
        ranks = range(session().world_size)
        counts = [len(deal(range(size), session().logical_ranks, rank, data.micro_batch_size)) for rank in ranks]
        if size and (len(set(counts)) > 1 or not counts[0]):
            raise ConfigError(
                f"with model.batch_norm = sync all ranks must have equally many micro-batches in each step, but of the {what}, of {size} images, "
                f"they have {counts}; give data.drop_last=true, another data.global_batch_size or data.micro_batch_size, or model.batch_norm=local"
            )


def _make_optimizer(config: ImageConfig, model: nn.Module) -> torch.optim.Optimizer:
    optimizer: OptimizerConfig = config.optimizer
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer.kind == "sgd":
        return torch.optim.SGD(
            parameters, config.lr, momentum=optimizer.momentum, weight_decay=optimizer.weight_decay, nesterov=optimizer.nesterov
        )
    return torch.optim.AdamW(parameters, config.lr, weight_decay=optimizer.weight_decay)


def _numbers(score: Score) -> list[float]:
    return [score.tally.nll, score.tally.tokens, score.correct, score.among_five]


def _score(numbers: list[Any]) -> Score:
    return Score(Tally(numbers[0], numbers[1]), numbers[2], numbers[3])
