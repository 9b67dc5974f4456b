"""`hora train lm`: trains a language model.

Configuration and data are looked at before anything is started, without torch.
"""

import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from hora import log
from hora.cli.recipe_job import as_rank, launch_ranks, new_run_dir, require_run, require_weights, words_of, write_json
from hora.errors import ConfigError
from hora.launch.names import Name
from hora.launch.report_words import ReportWords, report_options, require_writable
from hora.loading import load
from hora.recipes.lm.config import NAMED, LmConfig
from hora.recipes.lm.resolve import resolve_config, run_name
from hora.recipes.lm.text import locate
from hora.topology import Topology

_HELP = """Trains a language model on text, one word at a time.

\b
hora train lm --config small --data wikitext-2 --nproc 2
hora train lm --config medium --data DIR --set epochs=10 --run-dir runs/a
hora train lm --resume --run-dir runs/a
hora train lm --config demo --nproc 2 --report
hora run --nnodes 2 --node-rank 0 --master-addr node0 -np 16 -m hora train lm --config large --data DIR

The exit code is 75 when a signal ended the run and it can be resumed. If the disk refuses a checkpoint, training continues; the third
failure in a row ends it (checkpoint.end_after_failed_saves=3), and so does a failure of the run's last checkpoint or of the one after a signal.
"""


@dataclass(frozen=True)
class LmRequest:
    """The words of `hora train lm`; `config` None means small, or that of the run that is resumed."""

    config: str | None = None
    data: str | None = None
    overrides: tuple[str, ...] = ()
    nproc: int = 1
    max_restarts: int = 0
    warm_spares: bool = False
    deadline: str | None = None
    run_dir: Path | None = None
    resume: bool = False
    exact: bool = False
    init_from: Path | None = None
    allow_torch_file: bool = False
    device: str = "auto"
    json_file: Path | None = None
    at_end: ReportWords = field(default_factory=ReportWords)

    @property
    def name(self) -> str:
        """What directories and results are called after: the configuration, or the run that goes on with its own."""
        return self.run_dir.name if self.resume and self.run_dir and not self.config else run_name(self.config)

    def resolve(self) -> LmConfig:
        """The configuration.

        Raises:
            ConfigError: something in it, or the words together, are wrong.
        """
        self._require_words()
        overrides = (*self.overrides, "exact=true") if self.exact else self.overrides
        return resolve_config(self.config, self.data, overrides, resume_from=self.run_dir if self.resume else None)

    def require_files(self) -> None:
        """Looks for what rank 0 will read and write, so that a mistake is told before the first step.

        Raises:
            ConfigError: a file is missing, or the directory of one to be written.
            CheckpointError: there is no run to resume.
        """
        self._require_words()
        self.at_end.require_files()
        if self.run_dir is not None and self.resume:
            require_run(self.run_dir)
        require_writable("--json", self.json_file)
        require_weights("--init-from", self.init_from)

    def _require_words(self) -> None:
        if self.resume and self.run_dir is None:
            raise ConfigError("--resume must be told which run goes on; give its directory with --run-dir")
        if self.resume and self.init_from is not None:
            raise ConfigError("--resume goes on with the weights of the run, so --init-from cannot be given with it; leave one out")

    def words(self) -> list[str]:
        """The request as words that mean the same."""
        single = {
            "--config": self.config,
            "--data": self.data,
            "--nproc": self.nproc,
            "--run-dir": self.run_dir,
            "--init-from": self.init_from,
            "--device": None if self.device == "auto" else self.device,
            "--json": self.json_file,
        }
        flags = {"--resume": self.resume, "--exact": self.exact, "--allow-torch-file": self.allow_torch_file}
        return words_of("lm", single, self.overrides, flags, self.at_end)


@click.command("lm", help=_HELP, short_help="A language model: Zaremba's LSTM, or a small Transformer.")
@click.option("--config", type=Name(), metavar="|".join([*NAMED, "FILE"]), help="A configuration by name, or a YAML file. [small]")
@click.option(
    "--data", "--data-path", type=Name(), metavar="DIR|NAME", help="Folder with train.txt, valid.txt, test.txt; `wikitext-2`; `excerpt`."
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Overrides a setting, `optimizer.lr=0.5`; may be repeated.")
@click.option("--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Number of ranks on this machine.")
@click.option(
    "--max-restarts", type=click.IntRange(min=0), default=0, metavar="N", help="Restart from the latest checkpoint, at most N times."
)
@click.option("--warm-spares", is_flag=True, help="With --max-restarts: keep processes ready to be the next ranks, as of `hora run`.")
@click.option("--deadline", metavar="SECTION=SECONDS,...|off", help="How long ranks may make no progress, as of `hora run`. [learnt]")
@click.option(
    "--run-dir", type=Name(path_type=Path), metavar="DIR", help="Directory of everything that the run writes. [runs/lm-CONFIG-TIME]"
)
@click.option("--resume", is_flag=True, help="Continue the run in --run-dir at the exact step.")
@click.option("--exact", is_flag=True, help="The same bits on any number of ranks; short for --set exact=true.")
@click.option("--init-from", type=click.Path(path_type=Path), metavar="FILE", help="Start with the weights of a file or checkpoint.")
@click.option("--allow-torch-file", is_flag=True, help="Allow --init-from to be a file of torch.save, from a source you trust.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to train.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the results as rows.")
@report_options
def lm(**options: Any) -> int:
    """Starts the ranks, or is one."""
    at_end = ReportWords.take(options)
    request = LmRequest(at_end=at_end, **options)
    if Topology.from_env().source == "alone":
        return start_ranks(request)
    return train_as_rank(request)


def start_ranks(request: LmRequest, *, quiet: bool = False) -> int:
    """Looks at configuration and data, then trains on `request.nproc` ranks of this machine; returns the exit code of the job."""
    log.configure(rank=0, world_size=1)
    request.require_files()
    config = request.resolve()
    if config.exact and request.nproc > config.logical_ranks:
        raise ConfigError(
            f"in exact mode each rank plays at least one logical rank, but --nproc {request.nproc} is more than logical_ranks = "
            f"{config.logical_ranks}; start fewer, or begin a run with more"
        )
    if request.nproc > config.data.rows:
        raise ConfigError(
            f"each rank must have a row, but --nproc {request.nproc} is more than data.rows = {config.data.rows}; start fewer"
        )
    locate(config.data.path)
    run_dir = request.run_dir or new_run_dir("lm", request.name)
    words = LmRequest(**{**vars(request), "run_dir": run_dir}).words()
    return launch_ranks(
        words,
        request.deadline,
        nproc=request.nproc,
        max_restarts=request.max_restarts,
        warm_spares=request.warm_spares,
        log_dir=run_dir / "logs",
        log_word="--run-dir",
        quiet=quiet,
    )


def train_as_rank(request: LmRequest) -> int:
    """Trains as the rank that this process is; returns its exit code."""
    load("torch")
    from hora.comm.exactness import Exact
    from hora.recipes.lm.recipe import train
    from hora.recipes.lm.results import result_rows
    from hora.train.preemption import EXIT_CODE
    from hora.train.rank_zero import on_rank_zero

    config = request.resolve()
    exact = Exact(config.logical_ranks, config.seed, config.num_threads) if config.exact else None
    device = None if request.device == "auto" else request.device
    with as_rank(request.at_end, request.require_files, exact, device=device, config=asdict(config)):
        run_dir = Path(on_rank_zero(lambda: str(request.run_dir or new_run_dir("lm", request.name))))
        report = train(config, run_dir, resume=request.resume, init_from=request.init_from, allow_torch_file=request.allow_torch_file)
        write_json(request.json_file, lambda: result_rows(request.name, report, shlex.join(["hora", *request.words()])))
    return EXIT_CODE if report.preempted else 0
