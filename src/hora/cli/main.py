"""The `hora` command: finds a subcommand's module when it is called, so that none pays for what another loads."""

import difflib
import importlib
import sys
from collections.abc import Sequence

import click

import hora
from hora.launch.console import run_command

COMMANDS = {
    # name: what `hora --help` says; the module hora.cli.<name> holds the command as `command`
    "run": "Start a script on several ranks.",
    "train": "Train a recipe.",
    "translate": "Translate a text with a trained model.",
    "checkpoint": "Show, verify, export and average checkpoints.",
    "vocab": "Make a dictionary of the words in texts.",
    "demo": "Train with 2 ranks and with 1, and compare.",
    "prove": "Does the number of ranks change the model?",
    "ring": "Show the ring all-reduce step by step.",
    "bench": "Benchmark all-reduce, steps, data and launching.",
    "doctor": "Check this machine, or several hosts.",
    "scale": "How much faster with more ranks, and what limits it.",
    "compare": "Train a recipe with DataParallel, DDP, Horovod and Hora.",
    "chaos": "Inject faults into small jobs, and check how they recover.",
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """The names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Imports a command."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"hora.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command; an unknown one is refused with the nearest name."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"choose one of: {', '.join(COMMANDS)}"
            raise click.UsageError(f"unknown command {name!r}; {advice}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Lists the commands from the table, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


_HELP = """Trains one PyTorch model on many processes.

\b
hora run -np 4 train.py
"""


@click.group(cls=LazyGroup, help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hora.__version__, prog_name="hora")
def command() -> None:
    """The group itself does nothing."""


def main(args: Sequence[str] | None = None) -> int:
    """Runs `hora` with `args` (default: this process's); returns the exit code."""
    return run_command(command, args, name="hora")


if __name__ == "__main__":
    sys.exit(main())
