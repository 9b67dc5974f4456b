"""`hora chaos`: injects faults into small jobs on this machine, and says what became of them."""

import shlex
import sys
from pathlib import Path

import click

_SOAK_MINUTES = 30.0

_HELP = """Injects faults into small jobs on this machine, and judges each: exit code, the weights' bits, each sample once, nobody and nothing left,
what is said.

\b
  hora chaos                                   one trial of each quick scenario
  hora chaos --list
  hora chaos F1 F2 --repeats 20 --torchrun
  hora chaos --all --repeats 20 --soak 5 --json chaos.json      (goes on where it was interrupted)

A trial follows from its scenario and its seed. One for which this machine lacks something is skipped, and it is said what. The exit code is 1
if one has not passed, or none could be made.
"""


@click.command("chaos", help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, metavar="[SCENARIO...]")
@click.option("--all", "everything", is_flag=True, help="All scenarios, and not the quick ones alone.")
@click.option("--list", "only_list", is_flag=True, help="Say what there is.")
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Trials of each scenario.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Seed of the first; the others follow it."
)
@click.option("--torchrun", "peers", is_flag=True, help="The same with torchrun, where that is to be compared.")
@click.option(
    "--soak", "soak_minutes", type=click.FloatRange(min=0.5), metavar="MINUTES", help="F24 too: so long with a kill about once a minute."
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Keep the trials here; those in it are not made again."
)
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the table for the documentation.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), metavar="DIR", help="Keep what the jobs leave.")
def command(
    names: tuple[str, ...],
    everything: bool,
    only_list: bool,
    repeats: int,
    seed: int,
    peers: bool,
    soak_minutes: float | None,
    json_file: Path | None,
    markdown_file: Path | None,
    directory: Path | None,
) -> int:
    """Makes the trials, prints the table, and returns the exit code."""
    from hora.diag.chaos import board, course
    from hora.diag.chaos.scenario import on_ground
    from hora.diag.output import check_files
    from hora.launch.started import end_when_asked

    known = course.scenarios(soak_minutes)
    if only_list:
        for line in course.listing(course.scenarios(soak_minutes or _SOAK_MINUTES)):
            click.echo(line)
        return 0
    check_files(None, json_file)
    chosen = course.choose(names, known, quick=not everything)
    end_when_asked()  # jobs under way are ended with this process
    made = board.Board(json_file, shlex.join(["hora", *sys.argv[1:]]))
    with on_ground(directory) as ground:
        course.make_trials(ground, made, chosen, repeats, seed, peers=peers, tell=lambda doing: click.echo(f"{doing} ...", err=True))
    for line in board.lines(made, chosen):
        click.echo(line)
    if markdown_file is not None:
        markdown_file.write_text("\n".join(board.markdown(made, known, json_file.stem if json_file else "chaos")) + "\n", encoding="utf-8")
    trials = [trial for scenario in chosen for trial in made.of(scenario.name, "hora")]
    return 0 if trials and not any(trial.problems for trial in trials) else 1
