"""`hora translate`: translates a text with trained models, on ranks that it starts itself or as one of the ranks that another launcher started.

Models, vocabularies and text are looked at before anything is started, without torch.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hora import log
from hora.errors import ConfigError
from hora.launch.report_words import require_different_files, require_writable
from hora.loading import load
from hora.recipes.nmt.decoding.rules import Rules
from hora.topology import Topology

if TYPE_CHECKING:
    from hora.recipes.nmt.decoding.translate import Translated

_SETTINGS = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda name: name.replace("_", "-")}

_HELP = """Translates a text, one sentence a line, by beam search with a model that `hora train nmt` has trained.

Several models form an ensemble: the probability of each token is the mean of theirs. The number of ranks changes no translation.

\b
hora translate --model-path runs/nmt-a --source-path test.en --saveto test.de
hora translate --model-path runs/nmt-a/checkpoints/step-00001200.g0 --source-path test.en --saveto test.de --nproc 4
hora translate --model-path runs/a --model-path runs/b --keep-n 5 --source-path test.en --saveto best --json best.jsonl
cat test.en | hora translate --model-path runs/nmt-a > test.de
hora run -np 8 -m hora translate --model-path runs/nmt-a --source-path test.en --saveto test.de
"""


@dataclass(frozen=True)
class TranslateRequest:
    """The words of `hora translate`."""

    model_path: tuple[Path, ...]
    source_path: Path | None
    saveto: Path | None
    json_file: Path | None
    batch_size: int | None
    beam_size: int
    alpha: float
    max_steps: int
    keep_n: int
    max_ratio: float
    precision: str | None
    device: str
    nproc: int
    config_path: Path | None
    shared_dir: Path | None

    @property
    def rules(self) -> Rules:
        """Of the search.

        Raises:
            ConfigError: they contradict each other.
        """
        return Rules(self.beam_size, self.alpha, self.max_steps, self.keep_n, self.max_ratio)

    @property
    def outputs(self) -> list[Path]:
        """The files of translations: the best of each sentence, or with `keep_n` the best, the second and so on."""
        if self.saveto is None:
            return []
        return [self.saveto] if self.keep_n == 1 else [self.saveto.with_name(f"{self.saveto.name}.{place}") for place in range(self.keep_n)]

    def require(self) -> None:
        """Looks for what is read and written, so that a mistake is told before anything is translated.

        Raises:
            ConfigError, CheckpointError: a file is missing or cannot be used.
        """
        from hora.recipes.nmt.decoding.finding import find_all

        if self.rules.keep_n > 1 and self.saveto is None and self.json_file is None:
            raise ConfigError("--keep-n writes a file for each place, so --saveto or --json must say where; give one")
        if self.source_path is not None and not self.source_path.is_file():
            raise ConfigError(f"--source-path must be a text, but there is no file {self.source_path}")
        for word, path in (("--saveto", self.saveto), ("--json", self.json_file)):
            require_writable(word, path)
        require_different_files(
            [("--source-path", self.source_path), *(("--saveto", path) for path in self.outputs), ("--json", self.json_file)]
        )
        find_all(list(self.model_path), self.config_path)

    def words(self) -> list[str]:
        """The request as words that mean the same."""
        single = {
            "--source-path": self.source_path,
            "--saveto": self.saveto,
            "--json": self.json_file,
            "--batch-size": self.batch_size,
            "--beam-size": self.beam_size,
            "--alpha": self.alpha,
            "--max-steps": self.max_steps,
            "--keep-n": self.keep_n,
            "--max-ratio": self.max_ratio,
            "--precision": self.precision,
            "--device": self.device,
            "--config-path": self.config_path,
            "--shared-dir": self.shared_dir,
        }
        words = ["translate"]
        for path in self.model_path:
            words += ["--model-path", str(path)]
        for name, value in single.items():
            words += [] if value is None else [name, str(value)]
        return words


@click.command("translate", help=_HELP, context_settings=_SETTINGS)
@click.option(
    "--model-path",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    metavar="PATH",
    help="A run (its best checkpoint), a checkpoint, or weights; may be repeated.",
)
@click.option("--source-path", type=click.Path(path_type=Path), metavar="FILE", help="What to translate, plain or .gz. [standard input]")
@click.option(
    "--saveto",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where translations go; with --keep-n FILE.0, FILE.1, ... [standard output]",
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write a JSON line for each sentence, with scores."
)
@click.option("--batch-size", type=click.IntRange(min=1), metavar="N", help="Sentences in a batch. [512 on GPUs, 64 on CPUs]")
@click.option(
    "--beam-size", type=click.IntRange(min=1), default=5, show_default=True, metavar="N", help="Hypotheses kept for each sentence."
)
@click.option(
    "--alpha",
    type=float,
    default=0.0,
    show_default=True,
    help="Length penalty: log-probabilities are divided by ((5 + length) / 6) ** alpha.",
)
@click.option(
    "--max-steps", type=click.IntRange(min=1), default=150, show_default=True, metavar="N", help="Longest translation, in tokens."
)
@click.option(
    "--max-ratio", type=float, default=3.0, show_default=True, help="... and for a source of m tokens at most max_ratio * m + 10."
)
@click.option(
    "--keep-n", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Translations of each sentence, the best first."
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Data type to compute in. [bfloat16 on GPUs, float32 on CPUs]",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to translate.")
@click.option("--use-gpu", is_flag=True, help="Short for --device cuda.")
@click.option("--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Number of ranks on this machine.")
@click.option(
    "--config-path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="config.yaml of the run, vocab.json beside it. [found above PATH]",
)
@click.option("--shared-dir", type=click.Path(path_type=Path), metavar="DIR", help="Directory that all ranks share, for large objects.")
@click.option("--model-name", metavar="NAME", help="Accepted as in NJUNMT-pytorch, without effect: the configuration defines the model.")
@click.option("--multi-gpu", is_flag=True, help="Accepted as in NJUNMT-pytorch, without effect: the launcher or --nproc decides on ranks.")
def command(use_gpu: bool, model_name: str | None, multi_gpu: bool, **options: Any) -> int:
    """Starts the ranks, or is one."""
    del model_name, multi_gpu
    if use_gpu:
        options["device"] = "cuda"
    request = TranslateRequest(**options)
    if Topology.from_env().source != "alone":
        return translate_as_rank(request, launched=True)
    log.configure(rank=0, world_size=1)
    request.require()
    return translate_as_rank(request) if request.nproc == 1 else start_ranks(request)


def start_ranks(request: TranslateRequest) -> int:
    """Translates on `request.nproc` ranks of this machine; standard input and output are this process's. Returns the exit code."""
    from dataclasses import replace

    from hora.launch.job import launch
    from hora.launch.options import LaunchOptions

    with tempfile.TemporaryDirectory(prefix="hora-translate-") as directory:
        asked = request
        if request.source_path is None:
            request = replace(request, source_path=Path(directory, "source"))
            Path(directory, "source").write_bytes(sys.stdin.buffer.read())
        if request.saveto is None and request.keep_n == 1:
            request = replace(request, saveto=Path(directory, "translations"))
        options = LaunchOptions("hora.cli.main", tuple(request.words()), kind="module", nproc=request.nproc, quiet=True)
        code = launch(options)
        if code == 0 and asked.saveto is None and request.saveto is not None:
            sys.stdout.buffer.write(request.saveto.read_bytes())
            sys.stdout.buffer.flush()
    return code


def translate_as_rank(request: TranslateRequest, *, launched: bool = False) -> int:
    """Translates as the rank that this process is, which a launcher may have started; returns its exit code.

    Raises:
        ConfigError: something in the request is wrong; a rank of a launcher has no standard input, and its output is marked with the rank.
    """
    load("torch")
    from hora.comm.session import init, shutdown
    from hora.recipes.nmt.decoding.translate import Job, translate
    from hora.train.rank_zero import on_rank_zero

    if launched and (request.source_path is None or not (request.saveto or request.json_file)):
        raise ConfigError("under a launcher the text comes from a file and goes to files; give --source-path, and --saveto or --json")
    job = Job(list(request.model_path), request.source_path, request.rules, request.batch_size, request.config_path, request.precision)
    init(device=None if request.device == "auto" else request.device, shared_dir=request.shared_dir)
    try:
        on_rank_zero(request.require)
        found = translate(job)
        on_rank_zero(lambda: None if found is None else write(request, found))
    finally:
        shutdown()
    return 0


def write(request: TranslateRequest, found: "Translated") -> None:
    """Writes what was found; each file appears whole.

    Raises:
        ConfigError: a file cannot be written.
    """
    from hora.train.files import write_result

    columns = [
        "".join(f"{each[place].text if place < len(each) else ''}\n" for each in found.translations) for place in range(request.keep_n)
    ]
    if request.saveto is None and request.keep_n == 1:
        sys.stdout.buffer.write(columns[0].encode())
        sys.stdout.buffer.flush()
    for path, column in zip(request.outputs, columns, strict=False):
        write_result(path, column.encode())
    if request.json_file is not None:
        rows = zip(found.lines, found.translations, strict=True)
        lines = (json.dumps({"source": line, "translations": list(map(vars, each))}, ensure_ascii=False) for line, each in rows)
        write_result(request.json_file, "".join(f"{line}\n" for line in lines).encode())
