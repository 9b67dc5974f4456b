"""`hora train nmt`: trains a translation model, with the words of NJUNMT-pytorch beside Hora's own.

Configuration and data are looked at before anything is started, without torch.
"""

import shlex
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from hora import log
from hora.cli.recipe_job import as_rank, launch_ranks, new_run_dir, ranks_for_all_gpus, require_run, require_weights, words_of, write_json
from hora.errors import ConfigError
from hora.launch.names import Name
from hora.launch.report_words import ReportWords, report_options, require_writable
from hora.loading import load
from hora.recipes.nmt.config import NmtConfig
from hora.recipes.nmt.named import NAMED
from hora.recipes.nmt.resolve import require_files, resolve_config
from hora.topology import Topology
from hora.train.checkpoint.storage import Storage

_HELP = """Trains a translation model on parallel text.

\b
hora train nmt --config demo --nproc 2
hora train nmt --config tatoeba --data DIR --nproc 2
hora train nmt --config my.yaml --set training_configs.max_steps=20000 --run-dir runs/a
hora train nmt --resume --run-dir runs/a

Configuration files and options of NJUNMT-pytorch are accepted:

\b
hora train nmt --model_name a --config_path a.yaml --saveto save --valid_path valid --log_path log --reload

--saveto and --model_name make the run directory, save/a. The exit code is 75 when a signal ended the run and it can be resumed.
If the disk refuses a checkpoint, training continues; the third failure in a row ends it (training_configs.end_after_failed_saves=3), and
so does a failure of the run's last checkpoint or of the one after a signal.
"""


@dataclass(frozen=True)
class NmtRequest:
    """The words of `hora train nmt`."""

    config: str | None = None
    predefined_config: str | None = None
    data: Path | None = None
    overrides: tuple[str, ...] = ()
    nproc: int | None = None
    multi_gpu: bool = False
    max_restarts: int = 0
    warm_spares: bool = False
    deadline: str | None = None
    shared_dir: Path | None = None
    run_dir: Path | None = None
    model_name: str | None = None
    saveto: Path | None = None
    log_path: Path | None = None
    valid_path: Path | None = None
    resume: bool = False
    reload: bool = False
    exact: bool = False
    init_from: Path | None = None
    pretrain_path: Path | None = None
    allow_torch_file: bool = False
    device: str = "auto"
    use_gpu: bool = False
    debug: bool = False
    json_file: Path | None = None
    at_end: ReportWords = field(default_factory=ReportWords)

    @property
    def name(self) -> str:
        """What a run is called after: its own name, or the configuration's, or the directory of a run that goes on with its own."""
        config = self.config or self.predefined_config
        return self.model_name or (self.run_dir.name if self.resume and self.run_dir and not config else Path(config or "nmt").stem)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.run_dir or (self.saveto or Path("runs")) / self.name

    @property
    def resumes(self) -> bool:
        """Whether a run goes on: --resume wants it, --reload does if it has a checkpoint."""
        return self.resume or (
            self.reload and (self.directory / "config.yaml").is_file() and bool(Storage(self.directory / "checkpoints").names())
        )

    def resolve(self) -> NmtConfig:
        """The configuration.

        Raises:
            ConfigError: something in it, or the words together, are wrong.
        """
        if not (self.config or self.predefined_config or self.resumes):
            raise ConfigError(f"--config must say what to train: a YAML file, or one of {', '.join(NAMED)}")
        overrides = (*self.overrides, "training_configs.exact=true") if self.exact else self.overrides
        return resolve_config(
            self.config,
            self.data,
            overrides,
            predefined=self.predefined_config,
            resume_from=self.directory if self.resumes else None,
        )

    def require_files(self) -> None:
        """Looks for what rank 0 will read and write, so that a mistake is told before the first step.

        Raises:
            ConfigError: a file is missing, or the words together are wrong.
            CheckpointError: there is no run to resume.
        """
        self.at_end.require_files()
        if self.resume:
            require_run(self.directory)
        require_writable("--json", self.json_file)
        if self.use_gpu and self.device == "cpu":
            raise ConfigError("--use_gpu and --device cpu contradict each other; leave one out")
        given = {"--init-from": self.init_from, "--pretrain_path": self.pretrain_path}
        weights = {word: path for word, path in given.items() if path is not None}
        if len(weights) > 1 or (weights and self.resume):
            raise ConfigError(
                f"a run begins with the weights of one place, but {', '.join(weights)}{' and --resume' * self.resume} are given"
            )
        for word, path in weights.items():
            require_weights(word, path)

    def words(self) -> list[str]:
        """The request as words for the ranks."""
        single = {
            "--config": self.config,
            "--predefined-config": self.predefined_config,
            "--data": self.data,
            "--run-dir": self.directory,
            "--valid-path": self.valid_path,
            "--init-from": self.init_from,
            "--pretrain-path": self.pretrain_path,
            "--device": None if self.device == "auto" else self.device,
            "--model-name": self.model_name,
            "--json": self.json_file,
        }
        flags = {
            "--resume": self.resume,
            "--reload": self.reload,
            "--exact": self.exact,
            "--allow-torch-file": self.allow_torch_file,
            "--use-gpu": self.use_gpu,
            "--debug": self.debug,
        }
        return words_of("nmt", single, self.overrides, flags, self.at_end)


_PATH = Name(path_type=Path)


@click.command("nmt", help=_HELP, short_help="A translation model: Transformer or DL4MT.")
@click.option("--config", "--config-path", type=Name(), metavar="|".join([*NAMED, "FILE"]), help="A configuration by name, or a YAML file.")
@click.option("--predefined-config", metavar="NAME", help="A configuration by name, over which the file of --config takes precedence.")
@click.option("--data", type=_PATH, metavar="DIR", help="Folder with train.en, train.de, valid.en, ... for `lang_pair: en-de`; .gz too.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Overrides a setting, `training_configs.seed=2`; may be repeated."
)
@click.option("--nproc", type=click.IntRange(min=1), help="Number of ranks on this machine. [1]")
@click.option("--multi-gpu", is_flag=True, help="Without --nproc: a rank for each GPU of this machine.")
@click.option(
    "--max-restarts", type=click.IntRange(min=0), default=0, metavar="N", help="Restart from the latest checkpoint, at most N times."
)
@click.option("--warm-spares", is_flag=True, help="With --max-restarts: keep processes ready to be the next ranks, as of `hora run`.")
@click.option("--deadline", metavar="SECTION=SECONDS,...|off", help="How long ranks may make no progress, as of `hora run`. [learnt]")
@click.option("--shared-dir", type=_PATH, metavar="DIR", help="Directory that all nodes share, for large objects, as of `hora run`.")
@click.option(
    "--run-dir", type=_PATH, metavar="DIR", help="Directory of everything that the run writes. [SAVETO/MODEL_NAME, or runs/nmt-CONFIG-TIME]"
)
@click.option("--model-name", metavar="NAME", help="Name of the run. [that of the configuration]")
@click.option("--saveto", type=_PATH, metavar="DIR", help="Where the run directory is made. [runs]")
@click.option("--log-path", type=_PATH, metavar="DIR", help="Where the logs of the ranks go. [logs in the run directory]")
@click.option("--valid-path", type=_PATH, metavar="DIR", help="Where translations of the validation text go. [valid in the run directory]")
@click.option("--resume", is_flag=True, help="Continue the run in the run directory at the exact step.")
@click.option("--reload", is_flag=True, help="Likewise if the run has a checkpoint; otherwise begin a new run.")
@click.option("--exact", is_flag=True, help="The same bits on any number of ranks; short for --set training_configs.exact=true.")
@click.option("--init-from", type=_PATH, metavar="FILE", help="Start with the weights of a file or checkpoint.")
@click.option("--pretrain-path", type=_PATH, metavar="FILE", help="Likewise, with only those weights that fit.")
@click.option("--allow-torch-file", is_flag=True, help="Allow these to be files of torch.save, from a source you trust.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to train.")
@click.option("--use-gpu", is_flag=True, help="Short for --device cuda.")
@click.option("--debug", is_flag=True, help="Log, validate and save after each step.")
@click.option("--json", "json_file", type=_PATH, metavar="FILE", help="Write the results as rows.")
@report_options
def nmt(**options: Any) -> int:
    """Starts the ranks, or is one."""
    at_end = ReportWords.take(options)
    request = NmtRequest(at_end=at_end, **options)
    if Topology.from_env().source == "alone":
        return start_ranks(request)
    return train_as_rank(request)


def start_ranks(request: NmtRequest) -> int:
    """Looks at configuration and data, then trains on ranks of this machine; returns the exit code of the job."""
    log.configure(rank=0, world_size=1)
    request.require_files()
    config, nproc = request.resolve(), request.nproc or (ranks_for_all_gpus() if request.multi_gpu else 1)
    require_files(config, request.directory if request.resumes else None)
    training = config.training_configs
    if training.exact and nproc > training.logical_ranks:
        raise ConfigError(
            f"in exact mode each rank plays at least one logical rank, but --nproc {nproc} is more than training_configs.logical_ranks = "
            f"{training.logical_ranks}; start fewer, or begin a run with more"
        )
    saved_to = request.saveto is not None and request.run_dir is None
    request = replace(request, run_dir=_run_dir(request))
    return launch_ranks(
        request.words(),
        request.deadline,
        nproc=nproc,
        max_restarts=request.max_restarts,
        warm_spares=request.warm_spares,
        shared_dir=request.shared_dir,
        log_dir=request.log_path or request.directory / "logs",
        log_word="--log-path" if request.log_path else "--saveto" if saved_to else "--run-dir",
    )


def train_as_rank(request: NmtRequest) -> int:
    """Trains as the rank that this process is; returns its exit code."""
    load("torch")
    from hora.comm.exactness import Exact
    from hora.recipes.nmt.recipe import Start, train
    from hora.recipes.nmt.results import result_rows
    from hora.train.preemption import EXIT_CODE
    from hora.train.rank_zero import on_rank_zero

    config = request.resolve()
    training = config.training_configs
    exact = Exact(training.logical_ranks, training.seed, training.num_threads) if training.exact else None
    device = "cuda" if request.use_gpu else None if request.device == "auto" else request.device
    with as_rank(request.at_end, request.require_files, exact, device=device, config=asdict(config), shared_dir=request.shared_dir):
        run_dir = on_rank_zero(lambda: str(_run_dir(request)))
        resume = on_rank_zero(lambda: request.resumes)
        if request.reload and not resume:
            log.get_logger().info("--reload finds no checkpoint in %s, so a run begins", run_dir)
        start = Start(
            resume=resume,
            anew=request.reload,
            init_from=request.init_from,
            pretrain_from=request.pretrain_path,
            allow_torch_file=request.allow_torch_file,
            debug=request.debug,
            valid_path=request.valid_path,
        )
        report = train(config, Path(run_dir), start)
        write_json(request.json_file, lambda: result_rows(request.name, report, shlex.join(["hora", *request.words()])))
    return EXIT_CODE if report.preempted else 0


def _run_dir(request: NmtRequest) -> Path:
    """The run directory; without a name from the user one that no run has yet."""
    named = request.run_dir or request.saveto or request.model_name or request.resumes
    return request.directory if named else new_run_dir("nmt", request.name)
