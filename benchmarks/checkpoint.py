"""What a checkpoint costs: updates of the language model with a save among them, or none, in turns in the same run.

    hora run -np 2 benchmarks/checkpoint.py --json benchmarks/results/checkpoint.json [--config small] [--rounds 15] [--every 10] [--dir DIR]

The model, batch and clipping are those of the recipe, with momentum, the words random. `never` saves nothing; `synchronous` and `background`
save model and optimizer once in `--every` updates. Prints a table and writes rows: the mean time of an update with its share of the save, and how
long `save` itself keeps training waiting, in milliseconds, the median over the rounds of each.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import hora
from hora.diag.bench.registry import Workload
from hora.diag.bench.rows import rows, write_rows
from hora.recipes.lm.config import NAMED, LmConfig
from hora.recipes.lm.model import build_model, nll_sum
from hora.train.checkpoint.checkpointer import Checkpointer

VOCABULARY = 33_278


class Training:
    """Updates of the recipe's model, and saving it."""

    def __init__(self, config: LmConfig, directory: Path) -> None:
        device, share = hora.device(), config.data.rows // hora.world_size()
        self._model = build_model(config.model, vocabulary_size=VOCABULARY, window=config.data.window, seed=0).to(device)
        plain = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._optimizer = hora.DistributedOptimizer(plain, self._model, clip_norm=config.optimizer.clip_norm)
        self._words = torch.randint(VOCABULARY, (share, config.data.window + 1), device=device)
        self._checkpointer = Checkpointer(directory, keep_last=1)
        self._saves = 0

    def update(self) -> None:
        for batch in self._optimizer.micro_batches([self._words]):
            logits, _ = self._model(batch[:, :-1], self._model.initial_state(len(batch)))
            self._optimizer.backward(nll_sum(logits, batch[:, 1:]), weight=len(batch))
        self._optimizer.step()

    def save(self, *, background: bool) -> None:
        self._saves += 1
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        self._checkpointer.save(state, step=self._saves, epoch=0, background=background)

    def wait(self) -> None:
        self._checkpointer.wait()
        if hora.device().type == "cuda":
            torch.cuda.synchronize()
        hora.barrier()

    def size_bytes(self) -> int:
        return 2 * sum(parameter.nbytes for parameter in self._model.parameters())


def sampler(training: Training, every: int, background: bool | None, stalls: list[float]) -> Callable[[], float]:
    def sample() -> float:
        training.wait()
        begun_s = time.perf_counter()
        training.update()
        if background is not None:
            asked_s = time.perf_counter()
            training.save(background=background)
            stalls.append(1e3 * (time.perf_counter() - asked_s))
        for _ in range(every - 1):
            training.update()
        training.wait()
        return 1e3 * (time.perf_counter() - begun_s) / every

    return sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=["small", "medium"], default="small")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--dir", type=Path, help="where the checkpoints are written for the time being")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    hora.init()
    directory = Path(hora.broadcast_object(tempfile.mkdtemp(dir=options.dir)))
    training = Training(NAMED[options.config], directory)
    what = f"checkpoint.{hora.device().type}.lm-{options.config}"
    updates = Workload(f"{what}.update", f"an update, one save in {options.every}", "ms", hora.world_size())
    waits = Workload(f"{what}.save", "how long a save keeps training waiting", "ms", hora.world_size())
    for name, background in (("never", None), ("synchronous", False), ("background", True)):
        stalls: list[float] = []
        updates.variant(name)(sampler(training, options.every, background, stalls))
        if background is not None:
            waits.variant(name)(lambda stalls=stalls: stalls.pop(0))
    try:
        for background in (False, True):  # what is made once
            training.update()
            training.save(background=background)
        measurements = updates.measure(options.rounds)
        measurements += waits.measure(options.rounds)
    finally:
        training.wait()
        if hora.rank() == 0:
            shutil.rmtree(directory)
    if hora.rank() == 0:
        print(f"{training.size_bytes() / 1e6:.0f} MB, {hora.world_size()} ranks, one save in {options.every} updates")
        first = measurements[0]
        for each in measurements:
            ratios = sorted(sample / plain for sample, plain in zip(each.samples, first.samples, strict=True))
            beside = f"x {ratios[len(ratios) // 2]:.3f} of never" if each.workload is updates else ""
            print(f"{each.workload.name} {each.variant:12} {each.median:9.2f} ms  {beside}")
        if options.json:
            write_rows(options.json, rows(measurements, ["hora", "run", "-np", str(hora.world_size()), *sys.argv]))
    hora.shutdown()


if __name__ == "__main__":
    main()
