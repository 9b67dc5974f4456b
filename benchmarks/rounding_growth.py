"""How far two orders of summation drive the same training apart: one process, no ranks.

    python benchmarks/rounding_growth.py --json benchmarks/results/lm-rounding.json

Each configuration of the lm recipe is trained twice on the same text and from the same weights. The one run takes the gradient of all 20 rows at
once, the other adds the gradients of 10 and 10 rows, as two ranks do; in exact arithmetic they are equal.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from hora.diag.bench import rows
from hora.recipes.lm.config import NAMED, LmConfig
from hora.recipes.lm.data import read_corpus
from hora.recipes.lm.model import build_model, nll_sum

CASES = (("small", torch.float32), ("small", torch.float64), ("demo", torch.float32))
STEPS, EVERY, VOCABULARY = 300, 30, 5000


def losses(config: LmConfig, text: Tensor, dtype: torch.dtype, parts: list[int]) -> Iterator[float]:
    """Loss of each step of the plain loop, with the rows of a step taken in `parts`."""
    model = build_model(config.model, vocabulary_size=VOCABULARY, window=config.data.window, seed=config.seed).to(dtype)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, config.optimizer.lr, momentum=config.optimizer.momentum)
    states = [model.initial_state(part) for part in parts]
    for start in range(0, STEPS * config.data.window, config.data.window):
        window = text[:, start : start + config.data.window + 1].split(parts)
        optimizer.zero_grad()
        total = 0.0
        for index, part in enumerate(window):
            logits, state = model(part[:, :-1], states[index])
            states[index] = tuple(tensor.detach() for tensor in state)
            loss = nll_sum(logits, part[:, 1:])
            (loss / sum(parts)).backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(parameters, config.optimizer.clip_norm)
        optimizer.step()
        yield total


def measure(name: str, dtype: torch.dtype) -> list[float]:
    """The largest relative difference of the two runs' losses in each stretch of `EVERY` steps."""
    config = NAMED[name]
    tokens = read_corpus(replace(config.data, path="excerpt", max_vocabulary=VOCABULARY)).tokens["train"].long()
    text = tokens[: len(tokens) // 20 * 20].view(20, -1)
    together = zip(losses(config, text, dtype, [20]), losses(config, text, dtype, [10, 10]), strict=True)
    differences = [abs(first - second) / first for first, second in together]
    return [max(differences[at : at + EVERY]) for at in range(0, STEPS, EVERY)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name, dtype in CASES:
        samples = measure(name, dtype)
        what = f"lm/{name}/{str(dtype).removeprefix('torch.')}/loss apart after {STEPS} steps"
        print(what, *(f"{sample:.1e}" for sample in samples))
        facts = {"ranks": 1, "machine": rows.machine(), "versions": rows.versions(), "commit": rows.commit()}
        command = shlex.join(["python", *sys.argv])
        found.append({"what": what, "value": samples[-1], "unit": "relative", **facts, "command": command, "samples": samples})
    if arguments.json:
        rows.write_rows(arguments.json, found)


if __name__ == "__main__":
    main()
