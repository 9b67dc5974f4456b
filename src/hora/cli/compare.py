"""`hora compare RECIPE`: the same model on the same data in one process and in each way of using several. Loads no torch."""

import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from hora.compare.kinds import KINDS
from hora.compare.request import VARIANTS, Here, Request, choose_ranks, chosen, why_not
from hora.errors import ConfigError
from hora.launch.names import Name
from hora.launch.started import end_when_asked

_HELP = """Trains a recipe's model on its data for the same number of steps in one process and in each way of using several: with
nn.DataParallel, with sums by hand, with DistributedDataParallel, Horovod and Hora. Shows how long each takes, and whether it trains the same
model.

\b
hora compare image --nproc 2
hora compare lm --config small --data DIR --steps 300 --repeats 5 --json rows.json --html report.html
hora compare nmt --variants ddp,overlap --set training_configs.batch_size=800 --png compare.png
"""

_VARIANTS = "\n".join(["\b\nVariants:", *(f"  {name:14} {text}" for name, text in VARIANTS.items())])
_SHORT = {
    "image": "Image classifiers; by default on the digits that come with Hora.",
    "lm": "Language models; by default on the excerpt that comes with Hora.",
    "nmt": "Translation models; by default on the excerpt that comes with Hora.",
}
_FILE = click.Path(path_type=Path, dir_okay=False)
_COUNT = click.IntRange(min=1)
_LEAST_STEPS = 4
_WIDTH = 140


@click.group(
    "compare",
    help=_HELP,
    context_settings={"help_option_names": ["-h", "--help"]},
)
def command() -> None:
    """The group itself does nothing."""


def _command_of(recipe: str) -> click.Command:
    @click.command(
        recipe,
        help=f"{_SHORT[recipe]}\n\n--config, --data and --set are as of `hora train {recipe}`.\n\n{_VARIANTS}",
        short_help=_SHORT[recipe],
    )
    @click.option("--config", type=Name(), metavar="NAME|FILE", help="A configuration of the recipe, by name or a YAML file.")
    @click.option("-d", "--data", type=Name(), metavar="DATA", help="The data, as of `hora train`.")
    @click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Overrides a setting; may be repeated.")
    @click.option("--variants", metavar="NAME,...", help="What to compare with one process. [all that can run here]")
    @click.option("--nproc", type=_COUNT, metavar="N", help="Number of ranks. [2 on CPUs, all GPUs]")
    @click.option("--steps", type=click.IntRange(min=_LEAST_STEPS), default=100, show_default=True, help="Updates of each training run.")
    @click.option("--repeats", type=_COUNT, default=3, show_default=True, help="Training runs of each variant, in turns.")
    @click.option("--dropout", is_flag=True, help="Keep the dropout of the configuration, which draws other numbers on each rank.")
    @click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to train.")
    @click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write the rows, with all samples and losses.")
    @click.option("--png", type=_FILE, metavar="FILE", help="Draw training times and losses.")
    @click.option("--html", type=_FILE, metavar="FILE", help="Write everything as one page that needs no network.")
    def run(**words: Any) -> None:
        _compare(recipe, **words)

    return run


for _recipe in KINDS:
    command.add_command(_command_of(_recipe))


def _compare(
    recipe: str,
    *,
    config: str | None,
    data: str | None,
    overrides: Sequence[str],
    variants: str | None,
    nproc: int | None,
    steps: int,
    repeats: int,
    dropout: bool,
    device: str,
    json_file: Path | None,
    png: Path | None,
    html: Path | None,
) -> None:
    """Looks at everything, trains, shows, and writes what was asked for.

    Raises:
        ConfigError: something that was asked for is wrong or not there; nothing has been trained.
        HoraError: ranks have failed.
    """
    from hora.compare.course import compare
    from hora.diag.output import check_files
    from hora.launch import host
    from hora.launch.plan import threads_per_rank

    check_files(png, json_file, html)
    kind, num_gpus = KINDS[recipe], 0 if device == "cpu" else host.count_gpus()
    if device == "cuda" and not num_gpus:
        raise ConfigError("--device cuda needs GPUs, but this machine shows none")
    asked, ranks = chosen(variants), choose_ranks(nproc, num_gpus)
    settings = kind.resolve(config, data, overrides)
    kind.check(settings, ranks)
    here = Here(num_gpus, _horovod(), kind.carries_state(settings))
    skipped = {variant: reason for variant in asked if (reason := why_not(variant, here)) is not None}
    request = Request(
        recipe, config, data, tuple(overrides), tuple(variant for variant in asked if variant not in skipped), ranks, steps, repeats,
        num_gpus > 0, threads_per_rank(host.count_cores(), ranks), dropout,
    )  # fmt: skip
    name = kind.name(config, data)
    click.echo(f"{recipe} {name}: {', '.join(request.variants)}; {repeats} x {steps} steps on {ranks} ranks")
    end_when_asked()
    outcomes = compare(request, lambda text: click.echo(text, err=True))
    had_dropout, apart = kind.without_dropout(settings) != settings, kind.normalises_apart(settings)
    _report(outcomes, skipped, request, name, "none" if not had_dropout else "kept" if dropout else "off", apart, (json_file, png, html))


def _report(
    outcomes: Sequence[Any],
    skipped: dict[str, str],
    request: Request,
    name: str,
    dropout: str,
    apart: bool,
    files: tuple[Path | None, Path | None, Path | None],
) -> None:
    from rich.console import Console

    from hora.compare import show
    from hora.diag.bench.rows import machine, versions, write_rows

    kind, words, (json_file, png, html) = KINDS[request.recipe], ["hora", *sys.argv[1:]], files
    # Lines that a narrow window breaks say more than cells cut short.
    Console(width=max(Console().width, _WIDTH)).print(show.table(outcomes, kind, request))
    told = show.notes(outcomes, skipped, kind, request, dropout=dropout, apart=apart)
    for sentence in told:
        click.echo(sentence)
    click.echo(f"{machine()}; {', '.join(f'{package} {version}' for package, version in versions().items())}")
    click.echo(shlex.join(words))
    title = f"{request.recipe} {name} on {request.ranks} {'GPUs' if request.on_gpus else 'CPU processes'}"
    if json_file is not None:
        write_rows(json_file, show.rows_of(outcomes, kind, request, name, words))
        click.echo(f"rows in {json_file}")
    if png is not None:
        show.draw(outcomes, request, title, png)
        click.echo(f"picture in {png}")
    if html is not None:
        show.write_html(outcomes, kind, request, title, told, words, html)
        click.echo(f"page in {html}")


def _horovod() -> str | None:
    try:
        return metadata.version("horovod")
    except metadata.PackageNotFoundError:
        return None
