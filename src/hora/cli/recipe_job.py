"""What the commands of all recipes have in common: words for the ranks, starting them, and being one of them."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hora.errors import CheckpointError, ConfigError
from hora.launch.report_words import ReportWords

if TYPE_CHECKING:
    from hora.comm.exactness import Exact


def words_of(recipe: str, single: Mapping[str, Any], overrides: Sequence[str], flags: Mapping[str, bool], at_end: ReportWords) -> list[str]:
    """The words of `hora train RECIPE`: `single` with their values but for None, `--set` for each override, flags that are up."""
    words = ["train", recipe]
    for name, value in single.items():
        words += [] if value is None else [name, str(value)]
    for override in overrides:
        words += ["--set", override]
    return words + [name for name, given in flags.items() if given] + at_end.words()


def launch_ranks(words: Sequence[str], deadline: str | None, **options: Any) -> int:
    """Starts ranks that run `hora` with `words`; `options` are those of `LaunchOptions`. Returns the exit code of the job."""
    from hora.launch.deadlines import Deadlines
    from hora.launch.job import launch  # here, so that --help and mistakes are answered at once
    from hora.launch.options import LaunchOptions

    deadlines = Deadlines() if deadline is None else Deadlines.read(deadline)
    return launch(LaunchOptions("hora.cli.main", tuple(words), kind="module", deadlines=deadlines, **options))


@contextmanager
def as_rank(at_end: ReportWords, require_files: Callable[[], None], exact: "Exact | None", **joining: Any) -> Iterator[None]:
    """Inside the `with` block this process is a rank, as `hora.init(exact=exact, **joining)` makes it, and rank 0 has found all files."""
    from hora.comm.session import init, shutdown
    from hora.diag.report.recording import follow
    from hora.train.preemption import Preemption
    from hora.train.rank_zero import on_rank_zero

    # Without it cuDNN's recurrent layers and products of matrices may have other bits from run to run; read when a GPU is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # The signal may come a second time, from whoever sent it and through the launcher: what is left to do after the save is done all the same.
    with Preemption():
        init(exact=exact, **joining)
        try:
            on_rank_zero(require_files)
            follow(at_end)
            yield
        finally:
            shutdown()


def write_json(path: Path | None, rows: Callable[[], list[dict[str, Any]]]) -> None:
    """Has rank 0 write `rows` to `path`, if there is one. Collective."""
    from hora.diag.bench.rows import write_rows
    from hora.train.rank_zero import on_rank_zero

    if path is not None:
        on_rank_zero(lambda: write_rows(path, rows()))


def require_run(directory: Path) -> None:
    """Looks for a run that is to go on.

    Raises:
        CheckpointError: there is none in `directory`.
    """
    if not (directory / "config.yaml").is_file():
        raise CheckpointError(f"nothing to resume from in {directory}: start without --resume, or give the right run directory")


def require_weights(word: str, path: Path | None) -> None:
    """Looks for the weights that `word` names, if it was given.

    Raises:
        ConfigError: there are none at `path`.
    """
    if path is not None and not path.exists():
        raise ConfigError(f"{word} must name a file or a checkpoint, but there is no {path}")


def new_run_dir(recipe: str, name: str) -> Path:
    """A directory that no run has yet, named after the configuration and the time."""
    return Path("runs") / f"{recipe}-{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def ranks_for_all_gpus() -> int:
    """One rank for each GPU of this machine, counted without torch; one rank on CPUs where there is none."""
    from hora.launch import host

    return max(host.count_gpus(), 1)
