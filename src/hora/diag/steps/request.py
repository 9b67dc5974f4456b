"""What is to be measured, as asked for on the command line. Pure; loads no torch."""

import json
from dataclasses import asdict, dataclass
from typing import Final, Literal

from hora.diag.words import fields_of, names
from hora.errors import ConfigError

ADAMW: Final = "_adamw"
"""At the end of the name of a workload that trains with AdamW in the place of SGD."""

WORKLOADS: Final = {
    "lstm_small": "LSTM, 2 layers of 200, 20 x 20 tokens, SGD",
    f"lstm_small{ADAMW}": "the same, AdamW",
    "lstm_large": "LSTM, 2 layers of 1500, 20 x 35 tokens, SGD",
    f"lstm_large{ADAMW}": "the same, AdamW",
    "transformer_nmt": "Transformer, 6 + 6 layers of 512, 4096 target tokens in padded sentences, label smoothing, AdamW, bfloat16",
    "gpt2_1": "GPT-2 124M, 1 x 1024 tokens, AdamW, bfloat16",
    "gpt2_8": "GPT-2 124M, 8 x 1024 tokens, AdamW, bfloat16",
    "resnet50": "ResNet-50, 64 images of 224 x 224, SGD, bfloat16",
    "mlp": "8 layers of 1024, 64 samples, SGD",
}

_ANYWHERE: Final = {
    "single": "one process alone, no communication; on GPUs with a fused optimizer",
    "per-parameter": "an all-reduce for each parameter after backward",
    "ddp": "DistributedDataParallel",
    "ddp-best": "DistributedDataParallel with gradient_as_bucket_view and static_graph; on GPUs fused, with the better of two bucket sizes",
    "fused": "gradients in buffers of 64 MiB, summed after backward, as Horovod fuses them",
    "deferred": "DistributedOptimizer, sums after backward",
    "overlap": "DistributedOptimizer, sums during backward",
    "sharded": "DistributedOptimizer, optimizer state sharded over the ranks",
    "fsdp2": "fully_shard of the layers: parameters, gradients and optimizer state sharded",
}
_ON_GPUS: Final = {
    "single-captured": "one process alone in a CUDA graph: the floor",
    "single-compiled-captured": "one process alone, compiled and in a CUDA graph",
    "ddp-captured": "the whole step of ddp-best in a CUDA graph",
    "ddp-compiled-captured": "the same, compiled",
    "train-step": "TrainStep, captured by itself",
    "train-step-compiled": "TrainStep(compile=True)",
    "train-step-compiled-parts": 'TrainStep(compile="parts")',
    "train-step-sharded": "TrainStep with strategy sharded",
    "train-step-sharded-compiled": "the same, compiled",
    "train-step-sharded-compiled-parts": "the same, compiled in parts",
}
VARIANTS: Final = _ANYWHERE | _ON_GPUS
"""What can be measured, with what it is."""

STRATEGIES: Final = ("deferred", "overlap", "sharded")
"""Variants that are a strategy of DistributedOptimizer."""


def is_alone(variant: str) -> bool:
    """Whether each process trains for itself."""
    return variant.startswith("single")


def is_captured(variant: str) -> bool:
    """Whether the step is meant to run in a CUDA graph."""
    return variant.startswith("train-step") or variant.endswith("-captured")


def how_compiled(variant: str) -> bool | Literal["parts"]:
    """What `compile` of `TrainStep` does to the model."""
    return "parts" if variant.endswith("-parts") else "-compiled" in variant


@dataclass(frozen=True)
class Request:
    """Every variant of every workload; `tiny` makes models and batches so small that all is over in seconds. `backend` None: that of the device."""

    workloads: tuple[str, ...]
    variants: tuple[str, ...]
    ranks: int
    rounds: int
    steps: int
    on_gpus: bool
    tiny: bool
    backend: str | None = None

    def dump(self) -> str:
        """As JSON, for the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> "Request":
        """From what `dump` gave."""
        return cls(**fields_of(text))


def resolve(
    *,
    workloads: str | None,
    variants: str | None,
    ranks: int | None,
    rounds: int,
    steps: int,
    tiny: bool,
    num_gpus: int,
    backend: str | None = None,
) -> Request:
    """The request, with what was not said filled in.

    Raises:
        ConfigError: something is unknown or cannot be measured here.
    """
    on_gpus = num_gpus > 0
    if on_gpus and backend is not None:
        raise ConfigError(f"--backend is for CPUs, but this machine has {num_gpus} GPUs, which NCCL serves; leave it out, or hide them")
    chosen = tuple(VARIANTS if on_gpus else _ANYWHERE) if variants is None else names("variant", variants, tuple(VARIANTS))
    if not on_gpus and (captured := [name for name in chosen if name in _ON_GPUS]):
        raise ConfigError(f"variant {captured[0]} needs a GPU, but this machine shows none; choose from: {', '.join(_ANYWHERE)}")
    ranks = ranks or (num_gpus if on_gpus else 2)
    if on_gpus and ranks > num_gpus:
        raise ConfigError(f"each rank needs a GPU of its own, but {ranks} ranks are asked for and {num_gpus} GPUs are here")
    jobs = tuple(WORKLOADS if on_gpus else ("lstm_small", "mlp")) if workloads is None else names("workload", workloads, tuple(WORKLOADS))
    return Request(jobs, chosen, ranks, rounds, steps, on_gpus, tiny, backend)
