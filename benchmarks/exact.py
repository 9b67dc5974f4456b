"""What exact mode costs: GPT-2 124M with the same micro-batches under `overlap` and in exact mode, eager and captured, in turns in
the same run.

    hora run -np 4 benchmarks/exact.py --json benchmarks/results/exact.json [--rounds 3] [--steps 6] [--tiny]

The global batch is 8 micro-batches of 4 x 1024 tokens (bfloat16 autocast, AdamW, clipping). Prints the SHA-256 of all parameters after exact
training, which is the same for any number of ranks, and writes a row for each variant: median over the rounds of the mean time of a step.
"""

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import hora
from hora.diag.bench.registry import Measurement, Workload
from hora.diag.bench.rows import rows, write_rows
from hora.diag.steps.models import Gpt

MICRO_BATCHES, SAMPLES, NOT_TIMED = 8, 4, 5
VOCABULARY = 50_257


def loss_sum(model: nn.Module, batch: list[torch.Tensor], state: None) -> tuple[torch.Tensor, int, dict[str, torch.Tensor], None]:
    (words,) = batch
    targets = words[:, 1:]
    logits = model(words[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"), targets.numel(), {}, state


def train(steps: int, window: int, sizes: tuple[int, int, int], capture: bool) -> Iterator[nn.Module]:
    """The model after each of `steps` updates."""
    torch.manual_seed(0)
    model = Gpt(VOCABULARY, window, *sizes, dropout=0.1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, 0.02)
    model.to(hora.device())
    adamw = torch.optim.AdamW(model.parameters(), 3e-4)
    train_step = hora.TrainStep(model, loss_sum, adamw, clip_norm=1.0, precision="bfloat16", capture="auto" if capture else False)
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(VOCABULARY, (MICRO_BATCHES * SAMPLES * steps, window + 1), generator=generator)
    loader = hora.DataLoader(torch.utils.data.TensorDataset(words), global_batch_size=MICRO_BATCHES * SAMPLES, micro_batch_size=SAMPLES)
    for step in loader:
        train_step(step)
        yield model
    assert train_step.num_replayed == (steps - 3 if capture and train_step.eager_because is None else 0)
    if capture and train_step.eager_because is not None:
        print("not captured:", train_step.eager_because, file=sys.stderr)


def measure(variant: str, options: argparse.Namespace) -> tuple[float, str]:
    """Milliseconds a step, the first ones left out, in which a step is captured; and the digest of the parameters afterwards."""
    hora.init(exact=variant.startswith("exact"))
    window, sizes = (64, (64, 4, 2)) if options.tiny else (1024, (768, 12, 12))
    begin = 0.0
    for number, trained in enumerate(train(options.steps + NOT_TIMED, window, sizes, variant.endswith("captured"))):
        model = trained
        if number == NOT_TIMED - 1:
            synchronize()
            begin = time.perf_counter()
    synchronize()
    elapsed_ms = (time.perf_counter() - begin) / options.steps * 1e3
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().cpu().numpy().tobytes())
    digests = hora.all_gather_object(sha.hexdigest())
    assert len(set(digests)) == 1, digests
    return elapsed_ms, digests[0]


def synchronize() -> None:
    hora.barrier()
    if hora.device().type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try this out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # CUDA is in use before the first exact session
    samples: dict[str, list[float]] = {"overlap": [], "exact": [], "overlap-captured": [], "exact-captured": []}
    digests = set()
    for _ in range(options.rounds):
        for variant, times in samples.items():
            elapsed_ms, digest = measure(variant, options)
            times.append(elapsed_ms)
            if variant.startswith("exact"):
                digests.add(digest)
            ranks, rank = hora.world_size(), hora.rank()
            hora.shutdown()
    if rank == 0:
        workload = Workload(f"exact.gpt2-{'tiny' if options.tiny else '124m'}", "one update", "ms", ranks)
        measurements = [Measurement(workload, variant, tuple(times)) for variant, times in samples.items()]
        for measurement in measurements:
            print(f"{workload.name} {measurement.variant:16} {measurement.median:9.3f} ms  (ranks: {ranks})")
        print(f"parameters in exact mode, ranks: {ranks}: {' '.join(sorted(digests))}")
        if options.json:
            write_rows(options.json, rows(measurements, ["hora", "run", "-np", str(ranks), *sys.argv]))


if __name__ == "__main__":
    main()
