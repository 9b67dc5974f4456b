"""The bits of 40 steps in exact mode, as one SHA-256 for each model, to compare between numbers of ranks.

    hora run -np 3 benchmarks/bits.py --json benchmarks/results/bits.json [--steps 40]

Three models: the recipe's LSTM and Transformer with dropout, and a network of convolutions, BatchNorm and dropout on images that the data set
augments at random. The digest goes over the summed loss, parameters, buffers and optimizer state after every single step.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hora
from hora.comm.codec import encode
from hora.diag.bench.registry import Measurement, Workload
from hora.diag.bench.rows import rows, write_rows
from hora.recipes.lm.config import ModelConfig
from hora.recipes.lm.model import build_model, nll_sum
from hora.recipes.meter import Meter

VOCABULARY, WINDOW, ROWS = 500, 16, 24

Trained = tuple[nn.Module, hora.DistributedOptimizer, float]
"""Model, optimizer, and the loss of the global batch, after a step."""


class Pictures(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Noise with a class, shifted and mirrored at random whenever it is loaded."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._images = torch.randn(400, 3, 12, 12, generator=generator)
        self._classes = torch.randint(10, (400,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self._classes)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self._images[index].roll(int(torch.randint(3, ())), dims=2)
        return image.flip(2) if torch.rand(()) < 0.5 else image, self._classes[index]


def language(kind: str) -> Iterator[Trained]:
    heads = 4 if kind == "transformer" else 1
    config = ModelConfig(kind=kind, hidden_size=64, num_heads=heads, keep_prob=0.7)  # type: ignore[arg-type]
    model = build_model(config, vocabulary_size=VOCABULARY, window=WINDOW, seed=0).to(hora.device())
    optimizer = hora.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 1e-3), model, clip_norm=1.0)
    tokens = torch.randint(VOCABULARY, (ROWS * 800,), generator=torch.Generator().manual_seed(1)).to(hora.device())
    for step in hora.TextStream(tokens, global_batch_size=ROWS, window=WINDOW, micro_batch_size=2):
        meter = Meter(hora.device())
        for (inputs, targets), logical_rank in zip(optimizer.micro_batches(step), step.logical_ranks, strict=True):
            logits, _ = model(inputs, model.initial_state(len(inputs)))
            loss = nll_sum(logits, targets)
            optimizer.backward(loss, weight=targets.numel())
            meter.add(loss, targets.numel(), step.index, logical_rank)
        optimizer.step()
        yield model, optimizer, meter.collect().nll


def images() -> Iterator[Trained]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.3),
        nn.MaxPool2d(4), nn.Flatten(), nn.Linear(64, 10),
    ).to(hora.device())  # fmt: skip
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), model)
    loader = hora.DataLoader(Pictures(), global_batch_size=50, micro_batch_size=4, shuffle=True)
    while True:
        for step in loader:
            meter = Meter(hora.device())
            for (inputs, targets), logical_rank in zip(optimizer.micro_batches(step), step.logical_ranks, strict=True):
                loss = F.cross_entropy(model(inputs.to(hora.device())), targets.to(hora.device()), reduction="sum")
                optimizer.backward(loss, weight=len(targets))
                meter.add(loss, len(targets), step.index, logical_rank)
            optimizer.step()
            yield model, optimizer, meter.collect().nll


MODELS: dict[str, Callable[[], Iterator[Trained]]] = {
    "LSTM, dropout": lambda: language("lstm"),
    "Transformer, dropout": lambda: language("transformer"),
    "convolutions, BatchNorm, dropout": images,
}


def digest(steps: int, trained: Iterator[Trained]) -> str:
    """SHA-256 over everything after each of `steps` steps, the same on all ranks."""
    sha, done = hashlib.sha256(), 0
    for _, (model, optimizer, loss) in zip(range(steps), trained, strict=False):
        _, tensors = encode({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        sha.update(loss.hex().encode())
        for name, tensor in tensors.items():
            sha.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        done += 1
    assert done == steps
    digests = hora.all_gather_object(sha.hexdigest())
    assert len(set(digests)) == 1, digests
    return str(digests[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    content = []
    for name, trained in MODELS.items():
        hora.init(exact=True)
        ranks, rank, kind = hora.world_size(), hora.rank(), hora.device().type
        found = digest(options.steps, trained())
        hora.shutdown()
        if rank == 0:
            print(f"{name:33} {ranks} ranks, {kind}: {found}")
            workload = Workload(f"bits.{kind}", f"{options.steps} steps", "SHA-256", ranks)
            (row,) = rows([Measurement(workload, name, (0.0,))], ["hora", "run", "-np", str(ranks), *sys.argv])
            content.append({**row, "value": found, "samples": [found]})
    if content and options.json:
        write_rows(options.json, content)


if __name__ == "__main__":
    main()
