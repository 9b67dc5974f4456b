"""`hora ring`: the ring all-reduce, step by step."""

from pathlib import Path

import click

_HELP = """Shows the ring all-reduce step by step: what each rank sends, receives and then holds.

It is the schedule that hora.all_reduce carries out with algorithm="ring".

\b
  hora ring --ranks 4
  hora ring --ranks 4 --out ring.svg

The picture is animated, needs no network, and shows every step when it stands still, too (up to 8 ranks).
"""


@click.command("ring", help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--ranks", type=int, default=4, show_default=True, metavar="N", help="Number of ranks, 1 to 64.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Draw it, as SVG.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the schedule.")
def command(ranks: int, out: Path | None, json_file: Path | None) -> None:
    """Prints the steps and writes what was asked for."""
    from rich.console import Console

    from hora.diag.ring import story
    from hora.diag.ring.picture import draw
    from hora.train.files import write_result

    story.check_size(ranks)
    for path, text in ((out, draw), (json_file, story.as_json)):
        if path is not None:
            write_result(path, text(ranks).encode())
    console = Console()
    if console.is_terminal:
        console.print(story.table(ranks))
    else:
        click.echo("\n".join(story.lines(ranks)))
    click.echo(story.conclusion(ranks))
    for path in (out, json_file):
        if path is not None:
            click.echo(f"wrote {path}")
