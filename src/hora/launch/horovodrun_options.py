"""The options of `horovodrun` on Hora's commands, and what becomes of them; see `horovodrun_words`."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hora.errors import ConfigError
from hora.launch import horovodrun_words
from hora.launch.horovodrun_words import WORDS, Word

_TYPES: dict[str, dict[str, Any]] = {
    "count": {"type": click.IntRange(min=0), "metavar": "N"},
    "number": {"type": click.FloatRange(min=0), "metavar": "NUMBER"},
    "text": {"metavar": "TEXT"},
    "pair": {"type": click.IntRange(min=0), "nargs": 2, "metavar": "MIN MAX"},
}


def horovodrun_options(*, hidden: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command all options of horovodrun; `hidden`: without a word of them in its help."""

    def give(command: Callable[..., Any]) -> Callable[..., Any]:
        for word in reversed(WORDS):
            command = _option(word, hidden=hidden)(command)
        return command

    return give


def take(options: dict[str, Any]) -> dict[str, Any]:
    """Takes the words that were given out of the options of a command, and those of the configuration file behind them."""
    values = {word: options.pop(word.name) for word in WORDS}
    given = {word.name: value for word, value in values.items() if value not in (None, ()) and (value is not False or word.place)}
    file = given.pop("config_file", None)
    if file is None:
        return given
    from hora.launch.horovodrun_config import read_config  # here, because few have one

    return read_config(Path(file)) | given


def say_spellings(names: Mapping[str, Any]) -> str:
    """Words, as users give them."""
    return ", ".join(word.spellings[0] for word in WORDS if word.name in names)


def apply(given: dict[str, Any], options: dict[str, Any]) -> dict[str, str]:
    """Sets the options of `hora run` that the words `given` mean, and says what is to be said; returns variables for the ranks.

    Raises:
        ConfigError: what some ask for is not Hora's to give.
        UsageError: words of both say different things.
    """
    controller = given.pop("controller", "gloo")  # of the file: the command line counts for more
    if given.get("gloo") and options["mpi"]:
        raise click.UsageError("--gloo and --mpi contradict each other; give one of them")
    options["mpi"] = options["mpi"] or (controller == "mpi" and not given.get("gloo"))
    others = any(options.get(name) is not None for name in ("hosts", "hostfile", "host_discovery")) or "host_discovery_script" in given
    understood = horovodrun_words.understand(given, os.environ, others=others)
    timeline = given.get("timeline_filename")
    if timeline is not None and not others and not os.access(Path(timeline).absolute().parent, os.W_OK):
        raise ConfigError(f"--timeline-filename cannot write {timeline}; name a file in a directory that exists and may be written")
    context = click.get_current_context()
    known = {parameter.name: parameter for parameter in context.command.params}
    for name, value in understood.options.items():
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            options[name] = value
        elif same := _of(name, given):
            raise click.UsageError(f"{known[name].opts[0]} and {say_spellings(same)} say the same; give one of them")
    for remark in understood.remarks:
        click.echo(f"hora: {remark}", err=True)
    return dict(understood.variables)


def _of(option: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The words of `given` that alone would set an option of `hora run`."""
    alone = {name: horovodrun_words.understand({name: value}, {}, others=True).options for name, value in given.items()}
    return {name: given[name] for name, options in alone.items() if option in options}


def _option(word: Word, *, hidden: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    if word.kind == "switch":
        flags = [f"{flag}/--no-{flag[2:]}" if word.place else flag for flag in word.spellings]
        return click.option(*flags, word.name, is_flag=True, default=None, help=word.help, hidden=hidden)
    return click.option(*word.spellings, word.name, multiple=word.multiple, help=word.help, hidden=hidden, **_TYPES[word.kind])
