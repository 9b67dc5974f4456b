"""`hora train image`: trains an image classifier, with the words of three example scripts beside Hora's own.

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
from hora.recipes.image.architectures import NAMES
from hora.recipes.image.config import ImageConfig
from hora.recipes.image.named import NAMED
from hora.recipes.image.places import NAMED_SETS, locate
from hora.recipes.image.ranks_asked import Join, RankWords, Start, require_none, understand
from hora.recipes.image.resolve import default_name, resolve_config
from hora.recipes.image.words import overrides_of, repeat_names
from hora.topology import Topology

_HELP = """Trains an image classifier.

DATA is digits (which comes with Hora), mnist, fashion-mnist, cifar10, cifar100, synthetic, or a directory.

\b
hora train image --nproc 2
hora train image -d cifar10 -a resnet --depth 110 --nproc 8
hora train image --config cifar10-vgg19 --set optimizer.lr_rule=linear --batch-size 1024
hora train image --resume --run-dir runs/a
hora train image --evaluate --run-dir runs/a

--batch-size is the global batch, that of all ranks together. Other scripts count differently: --batch_size of dream-system and --train-batch of
torch_dist_lab count each rank, -b of PyTorch's ImageNet example counts each node. --batch-per-rank counts as the first two do.

\b
hora train image --nodes 1 --gpus 2 --nr 0 --epochs 5 --batch_size 100
hora train image -d cifar10 -a vgg19 --epochs 164 --schedule 81 122 --gamma 0.1 --checkpoint runs/vgg19 --nproc 4
hora train image -a resnet50 --dist-url tcp://node0:23456 --dist-backend nccl \\
    --multiprocessing-distributed --world-size 2 --rank 0 DIR

The exit code is 75 when a signal ended the run and it can be resumed. If the disk refuses a checkpoint, training continues; the third
failure in a row ends it (checkpoint.end_after_failed_saves=3), and so does a failure of the run's last checkpoint or of the one after a signal.
"""


@dataclass(frozen=True)
class ImageRequest:
    """The words of `hora train image`, those of scripts translated; `config` None means that of the run that is resumed, or for the data."""

    config: str | None = None
    data: str | None = None
    overrides: tuple[str, ...] = ()
    run_dir: Path | None = None
    resume: bool = False
    evaluate: bool = False
    exact: bool = False
    init_from: Path | None = None
    allow_torch_file: bool = False
    device: str = "auto"
    backend: str | None = None
    json_file: Path | None = None
    at_end: ReportWords = field(default_factory=ReportWords)

    @property
    def goes_on(self) -> bool:
        """Whether the configuration is that of the run in `run_dir`."""
        return self.resume or (self.evaluate and self.run_dir is not None)

    @property
    def name(self) -> str:
        """What directories and results are called after: the configuration, or the run that goes on with its own."""
        if self.goes_on and self.run_dir and not self.config:
            return self.run_dir.name
        return Path(self.config or default_name(self.data)).stem

    def resolve(self) -> ImageConfig:
        """The configuration.

        Raises:
            ConfigError: something in it, or the words together, are wrong.
        """
        overrides = (*self.overrides, "exact=true") if self.exact else self.overrides
        return resolve_config(self.config, self.data, overrides, resume_from=self.run_dir if self.goes_on else None)

    def require_files(self) -> None:
        """Looks for what rank 0 will read and write, so that a mistake is told before the first step.

        Raises:
            ConfigError: a file is missing, or the words together are wrong.
            CheckpointError: there is no run to go on with.
        """
        self.at_end.require_files()
        if self.resume and self.run_dir is None:
            raise ConfigError("--resume must be told which run goes on; give its directory with --run-dir")
        if self.goes_on and self.init_from is not None:
            raise ConfigError("a run in --run-dir goes on with its own weights, so --init-from cannot be given with it; leave one out")
        if self.evaluate and self.run_dir is None and self.init_from is None:
            raise ConfigError("--evaluate must be told whose weights: give a run with --run-dir, or a file with --init-from")
        if self.run_dir is not None and self.goes_on:
            require_run(self.run_dir)
        require_writable("--json", self.json_file)
        require_weights("--init-from", self.init_from)

    def words(self) -> list[str]:
        """The request as words that mean the same."""
        device, _, gpu = self.device.partition(":")
        single = {
            "--config": self.config,
            "--data": self.data,
            "--run-dir": self.run_dir,
            "--init-from": self.init_from,
            "--device": None if device == "auto" or gpu else device,
            "--gpu": gpu or None,
            "--dist-backend": self.backend,
            "--json": self.json_file,
        }
        flags = {
            "--resume": self.resume,
            "--evaluate": self.evaluate,
            "--exact": self.exact,
            "--allow-torch-file": self.allow_torch_file,
        }
        return words_of("image", single, self.overrides, flags, self.at_end)


class _ManyNumbers(click.Command):
    """Takes `--schedule 81 122`, as argparse does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_names(args, "--schedule"))


_PATH = Name(path_type=Path)
_COUNT = click.IntRange(min=1)


@click.command("image", cls=_ManyNumbers, help=_HELP, short_help="An image classifier: ConvNet, VGG, ResNet and others.")
@click.argument("directory", required=False, metavar="[DATA]", type=Name())
@click.option(
    "--config", type=Name(), metavar="NAME|FILE", help=f"A configuration: {', '.join(NAMED)}; or a YAML file. [the one for DATA, or digits]"
)
@click.option(
    "-d", "--data", "--dataset", type=Name(), metavar="DATA", help=f"Another way to give DATA: {', '.join(NAMED_SETS)}, or a directory."
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Overrides a setting, `optimizer.nesterov=true`; may be repeated."
)
@click.option("-a", "--arch", metavar="NAME", help=f"The network: {', '.join(NAMES)}, resnet110 and so on, timm:NAME.")
@click.option(
    "--depth",
    type=int,
    help="Layers of vgg (11, 13, 16, 19), resnet and preresnet (6n + 2), resnext (9n + 2), wide-resnet and densenet (6n + 4).",
)
@click.option("--block-name", type=click.Choice(["BasicBlock", "Bottleneck"]), help="Blocks of resnet or densenet.")
@click.option("--cardinality", type=int, help="Groups of resnext.")
@click.option("--widen-factor", type=int, help="Of wide-resnet.")
@click.option("--growth-rate", "--growthRate", type=int, help="Of densenet.")
@click.option("--compression-rate", "--compressionRate", type=int, help="Of densenet.")
@click.option("--drop", type=float, help="Dropout of wide-resnet or densenet.")
@click.option("--epochs", type=int, help="Passes over the training images.")
@click.option("-b", "--batch-size", "--train-batch", "batch_size", type=int, metavar="N", help="Images in an update, over all ranks.")
@click.option(
    "--batch-per-rank",
    type=_COUNT,
    metavar="N",
    help="Images in an update per rank, as other scripts count: the global batch is N x ranks.",
)
@click.option("--test-batch", type=int, metavar="N", help="Images in a step of evaluation, over all ranks; changes no result.")
@click.option("--lr", "--learning-rate", type=float, help="Learning rate; the number of ranks does not change it.")
@click.option(
    "--lr-rule",
    type=click.Choice(["none", "linear", "sqrt"]),
    help="How it scales with the global batch, relative to optimizer.base_batch_size.",
)
@click.option(
    "--schedule",
    type=int,
    multiple=True,
    metavar="EPOCH ...",
    help="Epochs, counted from 0, at whose start the learning rate is multiplied by --gamma.",
)
@click.option("--gamma", type=float, help="See --schedule.")
@click.option("--momentum", type=float, help="Of SGD.")
@click.option("--wd", "--weight-decay", "weight_decay", type=float, help="Weight decay.")
@click.option("--seed", "--manualSeed", type=int, help="Seed of weights, order and augmentation; the same on all ranks.")
@click.option("-j", "--workers", "--n-workers", "workers", type=int, help="Processes per rank that read image files.")
@click.option("--nproc", "-g", "--gpus", "nproc", type=_COUNT, metavar="N", help="Ranks of this node, on its GPUs or on CPUs. [1]")
@click.option("-n", "--nodes", "--nnodes", "nodes", type=int, metavar="N", help="Number of nodes; run this command on each. [1]")
@click.option("--nr", "-nr", "--node-rank", "node_rank", type=int, metavar="R", help="Which node this is, from 0.")
@click.option("--master-addr", metavar="HOST", help="Address of node 0.")
@click.option("--master-port", type=int, metavar="PORT", help="Port of node 0. [29500]")
@click.option(
    "--multiprocessing-distributed",
    is_flag=True,
    help="Start a rank for each GPU of this node, or --nproc; --world-size and --rank then count nodes.",
)
@click.option(
    "--world-size", type=int, metavar="N", help="Nodes with --multiprocessing-distributed; otherwise processes, each started by you."
)
@click.option("--rank", type=int, metavar="R", help="Which of the --world-size this is, from 0.")
@click.option("--dist-url", metavar="URL", help="Where they meet: tcp://HOST:PORT of number 0; for processes also file:///PATH or env://.")
@click.option(
    "--dist-backend",
    "backend",
    type=click.Choice(["nccl", "gloo", "shm", "mpi"]),
    help="The backend. [nccl on GPUs, shm or gloo on CPUs]",
)
@click.option("--gpu", type=click.IntRange(min=0), metavar="N", help="Index of the GPU to use, for a single process only.")
@click.option(
    "--max-restarts", type=click.IntRange(min=0), default=0, metavar="N", help="Restart from the latest checkpoint, at most N times."
)
@click.option("--warm-spares", is_flag=True, help="With --max-restarts: keep processes ready to be the next ranks, as of `hora run`.")
@click.option("--deadline", metavar="SECTION=SECONDS,...|off", help="How long ranks may make no progress, as of `hora run`. [learnt]")
@click.option(
    "-c",
    "--run-dir",
    "--checkpoint",
    "run_dir",
    type=_PATH,
    metavar="DIR",
    help="Directory of everything that the run writes. [runs/image-...]",
)
@click.option("--resume", is_flag=True, help="Continue the run in --run-dir at the exact step.")
@click.option("-e", "--evaluate", is_flag=True, help="Evaluate the latest checkpoint of --run-dir, or --init-from; train nothing.")
@click.option("--exact", is_flag=True, help="The same bits on any number of ranks; short for --set exact=true.")
@click.option("--init-from", type=_PATH, metavar="FILE", help="Start with the weights of a file or checkpoint.")
@click.option("--allow-torch-file", is_flag=True, help="Allow --init-from to be a file of torch.save, from a source you trust.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to train.")
@click.option("--json", "json_file", type=_PATH, metavar="FILE", help="Write the results as rows.")
@report_options
def image(**words: Any) -> int:
    """Starts the ranks, or is one."""
    at_end = ReportWords.take(words)
    rank_words = RankWords(**{name: words.pop(name) for name in RankWords.__annotations__})
    launching = {name: words.pop(name) for name in ("max_restarts", "warm_spares", "deadline")}
    here = Topology.from_env()
    if here.source != "alone":
        require_none(rank_words, here.source)
        return train_as_rank(_request(words, here.world_size, at_end))
    asked = understand(rank_words)
    if isinstance(asked, Join):
        return train_as_rank(_request(words, asked.world_size, at_end), asked)
    asked = replace(asked, nproc=asked.nproc or ranks_for_all_gpus())
    return start_ranks(_request(words, (asked.nproc or 1) * asked.num_nodes, at_end), asked, **launching)


def _request(words: dict[str, Any], world_size: int, at_end: ReportWords) -> ImageRequest:
    directory, gpu, device = words["directory"], words["gpu"], words["device"]
    if directory is not None and words["data"] is not None:
        raise ConfigError(f"DATA is given twice, {directory} and --data {words['data']}; leave one out")
    if gpu is not None and (world_size > 1 or device == "cpu"):
        raise ConfigError("--gpu is for one process on a GPU: of several ranks each takes the GPU of its own number; leave it out")
    kept = ("config", "run_dir", "resume", "evaluate", "exact", "init_from", "allow_torch_file", "backend", "json_file")
    return ImageRequest(
        data=words["data"] or directory,
        overrides=tuple(overrides_of(words, world_size)),
        device=device if gpu is None else f"cuda:{gpu}",
        at_end=at_end,
        **{name: words[name] for name in kept},
    )


def start_ranks(request: ImageRequest, asked: Start, *, max_restarts: int, warm_spares: bool, deadline: str | None) -> int:
    """Looks at configuration and data, then trains on ranks of this machine; returns the exit code of the job."""
    log.configure(rank=0, world_size=1)
    request.require_files()
    config, world_size = request.resolve(), (asked.nproc or 1) * asked.num_nodes
    most, what = (config.logical_ranks, "logical_ranks") if config.exact else (config.data.global_batch_size, "data.global_batch_size")
    if world_size > most:
        raise ConfigError(f"each rank must have work in a step, but {world_size} ranks are more than {what} = {most}; start fewer")
    locate(config.data.path)
    run_dir = request.run_dir or new_run_dir("image", request.name)
    return launch_ranks(
        request.words() if request.evaluate else replace(request, run_dir=run_dir).words(),
        deadline,
        nproc_per_node=str(asked.nproc or 1),
        num_nodes=asked.num_nodes,
        node_rank=asked.node_rank,
        master_addr=asked.master_addr,
        master_port=asked.master_port,
        max_restarts=max_restarts,
        warm_spares=warm_spares,
        log_dir=None if request.evaluate else run_dir / "logs",
        log_word="--run-dir",
    )


def train_as_rank(request: ImageRequest, asked: Join | None = None) -> int:
    """Trains, or evaluates, as the rank that this process is; returns its exit code."""
    load("torch")
    from hora.comm.exactness import Exact
    from hora.recipes.image.recipe import evaluate, train
    from hora.recipes.image.report import Report
    from hora.recipes.image.results import result_rows
    from hora.train.preemption import EXIT_CODE
    from hora.train.rank_zero import on_rank_zero

    config = request.resolve()
    exact = Exact(config.logical_ranks, config.seed, config.num_threads) if config.exact else None
    place: dict[str, Any] = {} if asked is None else asdict(asked)
    device = None if request.device == "auto" else request.device
    joining = {"device": device, "backend": request.backend, "config": asdict(config), **place}
    weights: dict[str, Any] = {"init_from": request.init_from, "allow_torch_file": request.allow_torch_file}
    command = shlex.join(["hora", *request.words()])
    with as_rank(request.at_end, request.require_files, exact, **joining):
        if request.evaluate:
            score = evaluate(config, run_dir=request.run_dir, **weights)
            write_json(request.json_file, lambda: result_rows(request.name, Report(test={0: score}), command))
            return 0
        run_dir = Path(on_rank_zero(lambda: str(request.run_dir or new_run_dir("image", request.name))))
        report = train(config, run_dir, resume=request.resume, **weights)
        write_json(request.json_file, lambda: result_rows(request.name, report, command))
    return EXIT_CODE if report.preempted else 0
