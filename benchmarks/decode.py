"""Sentences a second of beam search on one device: Hora's, captured and eager; every prefix read anew; and Hugging Face's Marian of the same sizes.

    python benchmarks/decode.py --json benchmarks/results/decode.json [--lengths FILE] [--sentences 2000] [--batch-size 512] [--rounds 3]

Weights are random, so lengths are made equal: no hypothesis ends, and each batch is given as many symbols as its longest source has. Sources are
drawn with the lengths of the lines of FILE in words times 1.3, or from 4 to 40. Batches have sentences of like length; Marian's have 200, as in the
run that its rate of 190 is from, and with `--marian-batch-size` another number. The plain search does a few sentences, one at a time. A variant runs
once before it is measured; `hora captured, first time` is that first run, in which graphs are captured.

    python benchmarks/decode.py --model RUN --source FILE [--alpha 1.0] [--json ...]

A trained model translates a text, from numbers to text; hypotheses end when they like.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import hora
from hora.diag.bench.registry import Measurement, Workload
from hora.diag.bench.rows import rows, write_rows
from hora.recipes.nmt.config import ModelConfig
from hora.recipes.nmt.decoding.batches import plan_batches
from hora.recipes.nmt.decoding.plain import search_plainly
from hora.recipes.nmt.decoding.rules import Rules
from hora.recipes.nmt.decoding.search import BeamSearch
from hora.recipes.nmt.decoding.translate import Job, load_models, read_source
from hora.recipes.nmt.decoding.translating import as_rows, translate_all
from hora.recipes.nmt.models import TranslationModel, build_model
from hora.recipes.nmt.symbols import BOS, EOS, PAD

UNIT = "sentences/s"


def make_sources(options: argparse.Namespace) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    if options.lengths:
        lines = options.lengths.read_text(encoding="utf-8").splitlines()[: options.sentences]
        lengths = [max(1, round(1.3 * len(line.split()))) for line in lines]
    else:
        lengths = (4 + 36 * torch.rand(options.sentences, generator=generator) ** 3).long().tolist()
    return [torch.randint(4, options.words, (length,), generator=generator).tolist() for length in lengths]


def make_model(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> TranslationModel:
    width = options.width
    config = ModelConfig(
        n_layers=options.layers, n_head=width // 64, d_word_vec=width, d_model=width, d_inner_hid=2 * width, generator_bias=True,
        tie_source_target_embedding=True,
    )  # fmt: skip
    model = build_model(config, options.words, options.words, seed=1)
    with torch.no_grad():
        model.get_parameter("generator.bias")[EOS] = -1e4
    return model.copy_to_decode(device, dtype)


class Task:
    """The sentences in batches, and what each of them is to become."""

    def __init__(self, sources: Sequence[Sequence[int]], batch_size: int, device: torch.device) -> None:
        batches = plan_batches([len(source) for source in sources], batch_size)
        self.batches = [as_rows([sources[index] for index in batch]).to(device) for batch in batches]
        self.sentences = sum(map(len, self.batches))
        self.device = device

    def rate(self, translate: Callable[[torch.Tensor, int], object]) -> float:
        """Sentences a second."""
        synchronize(self.device)
        begun_s = time.perf_counter()
        for batch in self.batches:
            translate(batch, batch.size(1))
        synchronize(self.device)
        return self.sentences / (time.perf_counter() - begun_s)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def hora_search(model: TranslationModel, beam_size: int, *, capture: bool) -> Callable[[torch.Tensor, int], object]:
    search = BeamSearch([model], Rules(beam_size), capture=capture)

    def translate(source: torch.Tensor, length: int) -> object:
        search.rules = replace(search.rules, max_steps=length)
        return search.translate(source)

    return translate


def plain_search(model: TranslationModel, beam_size: int) -> Callable[[torch.Tensor, int], object]:
    return lambda source, length: search_plainly([model], source[0].tolist(), Rules(beam_size, max_steps=length))


def marian(options: argparse.Namespace, device: torch.device) -> Callable[[torch.Tensor, int], object]:
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=options.words, d_model=options.width, encoder_layers=options.layers, decoder_layers=options.layers,
        encoder_attention_heads=options.width // 64, decoder_attention_heads=options.width // 64, encoder_ffn_dim=2 * options.width,
        decoder_ffn_dim=2 * options.width, max_position_embeddings=1024, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=BOS,
        decoder_start_token_id=BOS, forced_eos_token_id=None, scale_embedding=True,
    )  # fmt: skip
    model = MarianMTModel(config).to(device).eval()

    @torch.no_grad()
    def translate(source: torch.Tensor, length: int) -> object:
        with torch.autocast(device.type, torch.bfloat16):
            return model.generate(
                input_ids=source, attention_mask=source.ne(PAD), num_beams=options.beam_size, min_new_tokens=length, max_new_tokens=length
            )

    return translate


def measure_random(options: argparse.Namespace, device: torch.device) -> list[Measurement]:
    model, sources = make_model(options, device, getattr(torch, options.dtype)), make_sources(options)
    task = Task(sources, options.batch_size, device)
    name = f"decode_sentences_per_s.{options.layers}x{options.width}/beam {options.beam_size}/{options.dtype}"
    workload = Workload(name, f"{len(sources)} sentences, lengths made equal, random weights", UNIT, 1)
    captured = hora_search(model, options.beam_size, capture=True)
    first = task.rate(captured)
    print(f"hora captured, first time: {first:,.0f} {UNIT}", flush=True)
    eager = hora_search(model, options.beam_size, capture=False)
    few = Task([sources[index] for index in range(0, len(sources), max(1, len(sources) // options.plain_sentences))], 1, device)
    variants: dict[str, Callable[[], float]] = {
        f"hora captured, batches of {options.batch_size}": lambda: task.rate(captured),
        f"hora eager, batches of {options.batch_size}": lambda: task.rate(eager),
        f"every prefix anew, one of {few.sentences} sentences at a time": lambda: few.rate(plain_search(model, options.beam_size)),
    }
    try:
        theirs, batch_size = marian(options, device), options.marian_batch_size
    except ImportError as error:
        print(f"without Marian: {error}", flush=True)
    else:
        marian_task = Task(sources, batch_size, device)
        variants[f"transformers Marian, batches of {batch_size}, bfloat16 autocast"] = lambda: marian_task.rate(theirs)
    for variant, body in variants.items():
        workload.variant(variant)(body)
    measured = workload.measure(options.rounds)
    return [replace(measured[0], variant="hora captured, first time", samples=(first,)), *measured]


def measure_trained(options: argparse.Namespace, device: torch.device) -> list[Measurement]:
    hora.init(device=device)
    rules = Rules(options.beam_size, options.alpha)
    models, vocabularies = load_models(Job([options.model], options.source, rules, precision=options.dtype))
    sources = vocabularies.source.encode_all(read_source(options.source))
    name = f"decode_sentences_per_s.trained/beam {options.beam_size}, alpha {options.alpha}/{options.dtype}"
    workload = Workload(name, f"{len(sources)} sentences of {options.source.name}", UNIT, 1)

    def rate(search: BeamSearch) -> float:
        begun_s = time.perf_counter()
        translate_all(search, sources, vocabularies.target.decode, batch_size=options.batch_size)
        return len(sources) / (time.perf_counter() - begun_s)

    for kind in ("captured", "eager"):
        search = BeamSearch(models, rules, capture=kind == "captured")
        workload.variant(f"hora {kind}, batches of {options.batch_size}")(partial(rate, search))
    measured = workload.measure(options.rounds)
    hora.shutdown()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=2000)
    parser.add_argument("--lengths", type=Path, metavar="FILE")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--marian-batch-size", type=int, default=200)
    parser.add_argument("--plain-sentences", type=int, default=10)
    parser.add_argument("--beam-size", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--words", type=int, default=8000)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--model", type=Path, metavar="RUN")
    parser.add_argument("--source", type=Path, metavar="FILE")
    parser.add_argument("--alpha", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measurements = measure_trained(options, device) if options.model else measure_random(options, device)
    for measurement in measurements:
        print(f"{measurement.median:10,.1f} {UNIT}  {measurement.variant}  {[round(sample, 1) for sample in measurement.samples]}")
    if options.json:
        write_rows(options.json, rows(measurements, ["python", *sys.argv]))


if __name__ == "__main__":
    main()
