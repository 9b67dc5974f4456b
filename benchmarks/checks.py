"""What the checks cost: an update of the language model with them and without, in turns in the same run.

    hora run -np 2 benchmarks/checks.py --json benchmarks/results/checks.json [--config small] [--rounds 5] [--steps 100]

The model, batch and clipping are those of the recipe, the words random. `on` is what everybody gets: gradients looked at, parameters compared
every 100 updates; `off` is neither. `foreach`: with an optimizer that the device cannot switch off by itself. Prints a table and writes a row for
each variant: the median over the rounds of the mean time of an update, in milliseconds.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import hora
from hora.diag.bench.registry import Workload
from hora.diag.bench.rows import rows, write_rows
from hora.recipes.lm.config import NAMED, LmConfig
from hora.recipes.lm.model import build_model, nll_sum

VOCABULARY = 33_278
OFF = hora.Checks(non_finite="ignore", check_every=0)


def updater(config: LmConfig, checks: hora.Checks, *, fused: bool) -> Callable[[], None]:
    """One update of the recipe's model."""
    device, share = hora.device(), config.data.rows // hora.world_size()
    model = build_model(config.model, vocabulary_size=VOCABULARY, window=config.data.window, seed=0).to(device)
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused, foreach=not fused)
    optimizer = hora.DistributedOptimizer(plain, model, clip_norm=config.optimizer.clip_norm, checks=checks)
    words = torch.randint(VOCABULARY, (share, config.data.window + 1), device=device)

    def update() -> None:
        for batch in optimizer.micro_batches([words]):
            logits, _ = model(batch[:, :-1], model.initial_state(share))
            optimizer.backward(nll_sum(logits, batch[:, 1:]), weight=share)
        optimizer.step()

    return update


def timed(step: Callable[[], None], steps: int) -> float:
    """Mean time of a step in milliseconds, the ranks beginning together."""
    hora.barrier()
    if hora.device().type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    if hora.device().type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=["small", "medium"], default="small")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    hora.init()
    workload = Workload(f"checks.{hora.device().type}.lm-{options.config}", "one update", "ms", hora.world_size())
    for name, checks, fused in (("off", OFF, True), ("on", None, True), ("off, foreach", OFF, False), ("on, foreach", None, False)):
        update = updater(NAMED[options.config], checks or hora.Checks(), fused=fused)
        workload.variant(name)(lambda update=update: timed(update, options.steps))
    measurements = workload.measure(options.rounds)
    if hora.rank() == 0:
        for measurement in measurements:
            print(f"{workload.name} {measurement.variant:12} {measurement.median:9.3f} ms  (ranks: {hora.world_size()})")
        if options.json:
            write_rows(options.json, rows(measurements, ["hora", "run", "-np", str(hora.world_size()), *sys.argv]))
    hora.shutdown()


if __name__ == "__main__":
    main()
