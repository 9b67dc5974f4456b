"""The words `--report`, `--report-json` and `--trace`: options of commands that start a job, and the variables that bring them to the ranks."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hora import env
from hora.errors import ConfigError
from hora.writing import own_descriptor


@dataclass(frozen=True)
class ReportWords:
    """What is wanted of a job's steps when it ends.

    Attributes:
        report: print where their time went.
        report_json: write that to this file.
        trace: write the latest steps to this file, for Perfetto.
    """

    report: bool = False
    report_json: Path | None = None
    trace: Path | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "ReportWords":
        """What the variables ask for."""
        report_json, trace = environ.get(env.REPORT_JSON), environ.get(env.TRACE)
        return cls(environ.get(env.REPORT) == "1", Path(report_json) if report_json else None, Path(trace) if trace else None)

    @classmethod
    def take(cls, options: dict[str, Any]) -> "ReportWords":
        """Takes the words out of the options of a command."""
        return cls(**{name: options.pop(name) for name in ("report", "report_json", "trace")})

    @property
    def wanted(self) -> bool:
        """Whether steps are to be recorded."""
        return self != ReportWords()

    def variables(self) -> dict[str, str]:
        """The variables that ask for the same, from whatever directory."""
        files = {env.REPORT_JSON: self.report_json, env.TRACE: self.trace}
        named = {name: str(path.absolute()) for name, path in files.items() if path is not None}
        return ({env.REPORT: "1"} if self.report else {}) | named

    def words(self) -> list[str]:
        """The words that mean the same."""
        words = ["--report"] if self.report else []
        for name, path in {"--report-json": self.report_json, "--trace": self.trace}.items():
            words += [] if path is None else [name, str(path)]
        return words

    def require_files(self) -> None:
        """Looks for the directories of the files, so that a mistake is told before the first step.

        Raises:
            ConfigError: one is not there, or may not be written; or both are one file.
        """
        named = {"--report-json": self.report_json, "--trace": self.trace}
        for word, path in named.items():
            require_writable(word, path)
        require_different_files(named.items())


def require_writable(word: str, path: Path | None) -> None:
    """Refuses a file that could not be written in the end, before the work that it is to tell of.

    Raises:
        ConfigError: `path` is a directory, or in one that is not there or may not be written.
    """
    if path is not None and not _may_be_written(path):
        raise ConfigError(f"{word} cannot write {path}; name a file in a directory that exists and may be written")


def _may_be_written(path: Path) -> bool:
    if own_descriptor(path) is not None:
        return path.exists()
    if path.exists() and not path.is_symlink() and not path.is_file():
        return not path.is_dir() and os.access(path, os.W_OK)  # a device or a pipe, which is written to
    return not path.is_dir() and os.access(path.absolute().parent, os.W_OK)


def require_different_files(named: Iterable[tuple[str, Path | None]]) -> None:
    """Refuses words that name one file, of which the last would be left; /dev/null and /dev/stdout may be all of them.

    Raises:
        ConfigError: two words do.
    """
    taken: dict[Path, str] = {}
    for word, path in named:
        if path is None or own_descriptor(path) is not None or (path.exists() and not path.is_file()):
            continue
        other = taken.setdefault(path.resolve(), word)
        if other != word:
            raise ConfigError(f"{word} would write over {path}, which {other} names already; give another file")


def report_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the three options."""
    file = click.Path(path_type=Path)
    options = (
        click.option("--report", is_flag=True, help="Print at the end where the time of a training step goes, and what to change first."),
        click.option("--report-json", type=file, metavar="FILE", help="Write that report as JSON."),
        click.option("--trace", type=file, metavar="FILE", help="Write the latest steps of all ranks for Perfetto (ui.perfetto.dev)."),
    )
    for option in reversed(options):
        command = option(command)
    return command
