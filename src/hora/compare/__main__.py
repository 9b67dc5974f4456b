"""A rank of a comparison: `python -m hora.compare REQUEST RESULTS`, under `hora run`. Rank 0 writes a line for each variant to the file RESULTS."""

import gc
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import hora
from hora import log
from hora.comm.session import session
from hora.compare.request import Request
from hora.compare.subjects import Subject, load
from hora.compare.ways import step_maker, strategy_of
from hora.diag.ranks import WRONG
from hora.errors import ConfigError, HoraError
from hora.exits import code_after
from hora.train.precision import float32_products


@dataclass(frozen=True)
class Trained:
    """What one training run came to, the same on every rank.

    Attributes:
        seconds: of each stretch of steps, those of the slowest rank.
        losses: training loss of each stretch, of all ranks.
        loss: on data that were not trained on, after the last step.
        quality: accuracy or perplexity on them.
        waiting: share of a step in which sums, and with them the ranks that come last, were waited for; None where that cannot be told.
        backend, device: what moved the bytes, and what computed.
        eager_because: why a step that should be captured was not.
    """

    variant: str
    seconds: list[float]
    losses: list[float]
    loss: float
    quality: float
    waiting: float | None
    backend: str
    device: str
    eager_because: str | None = None


def main(request_text: str, results: Path) -> None:
    """Trains what the first argument says."""
    request = Request.parse(request_text)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as for the ranks of `hora train`: read when a GPU is first used
    hora.init(device=None if request.on_gpus else "cpu")
    log.get_logger().setLevel(logging.WARNING)  # each of the many runs would say how many samples there are
    if not request.on_gpus:
        torch.set_num_threads(request.threads)
    try:
        for trained in train_all(request):
            _write(results, asdict(trained))
    except ConfigError as error:  # on all ranks alike
        _write(results, {WRONG: str(error)})
    hora.shutdown()


def _write(results: Path, point: Mapping[str, Any]) -> None:
    if hora.rank() == 0:
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")


def train_all(request: Request) -> Iterator[Trained]:
    """Trains the variants, one after the other. Collective.

    Raises:
        ConfigError: the configuration or the data are not as they must be; on all ranks alike.
        HoraError: training diverged; names the variant.
    """
    subject = load(request.recipe, (request.config, request.data, request.overrides), dropout=request.dropout)
    with float32_products(tf32=subject.kind.training(subject.config).tf32):
        for variant in request.variants:
            try:
                trained = train(variant, subject, request)
            except ArithmeticError as error:  # a loss or a gradient that is no number
                raise HoraError(f"{variant} was ended: {error}") from error
            yield trained


def train(variant: str, subject: Subject, request: Request) -> Trained:
    """Trains one variant from the beginning. Collective."""
    is_captured = variant == "captured"
    with step_maker(variant, request.ranks) as make_step:
        config = subject.kind.with_way(subject.config, strategy=strategy_of(variant), capture=is_captured)
        trainer = subject.trainer(config, make_step)
        steps = _endlessly(subject.steps(trainer))
        seconds, losses = [], []
        hora.record_steps(warm_up=request.warm_up)
        for size in request.stretches():
            seconds.append(_timed(trainer, steps, size))
            losses.append(_loss(subject, trainer))
        waiting = _waiting()
        loss, quality = subject.evaluate(trainer)
        eager_because = trainer.train_step.eager_because if is_captured and not trainer.train_step.num_replayed else None
        if is_captured:
            trainer.train_step.release_graphs()
        del trainer, steps, make_step
    gc.collect()
    slowest = [max(of_ranks) for of_ranks in zip(*hora.all_gather_object(seconds), strict=True)]
    here = session()
    return Trained(variant, slowest, losses, loss, quality, waiting, here.backend, here.device.type, eager_because)


def _endlessly(loader: Any) -> Iterator[Any]:
    """The steps of one epoch after the other, of which each has one at least."""
    while True:
        yield from loader


def _timed(trainer: Any, steps: Iterator[Any], count: int) -> float:
    """Trains so many steps, the ranks beginning together; seconds."""
    hora.barrier()
    _synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        trainer.update(next(steps))
    _synchronize()
    return time.perf_counter() - begin


def _loss(subject: Subject, trainer: Any) -> float:
    """Training loss of all ranks since the last time."""
    tally = subject.tally(trainer)
    if isinstance(trainer.train_step, hora.TrainStep):
        return tally.loss
    nll = torch.tensor([tally.nll], dtype=torch.float64, device=hora.device())
    return float(hora.all_reduce(nll)) / tally.tokens


def _waiting() -> float | None:
    """Of the time inside steps. Collective."""
    if hora.world_size() == 1:
        return None
    report = hora.report()
    if report.replayed > 0:
        return None
    times = report.times
    return float((times.communication.share + times.agreement.share) / (1 - times.outside.share))


def _synchronize() -> None:
    if hora.device().type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except HoraError as failure:
        sys.stderr.write(f"hora: {failure}\n")
        sys.exit(code_after(failure))
    except KeyboardInterrupt:
        sys.exit(130)
