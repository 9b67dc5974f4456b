"""`hora doctor`: looks at this machine, and says what to do."""

from pathlib import Path

import click

_HELP = """Looks at this machine: cores, memory, limits, GPUs and their links, versions, names, interfaces, and what is open to the network.

Each line is ok, WARNING or WRONG, with what to do. The exit code is 1 if something is wrong, else 0.

\b
  hora doctor
  hora doctor --shared-dir /mnt/team/runs --json doctor.json
"""


@click.command("doctor", help=_HELP, short_help="Look at this machine.", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--shared-dir", type=click.Path(path_type=Path), metavar="DIR", help="Look at this directory, which all hosts of a job are to see."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write what was found; - for the terminal.")
def command(shared_dir: Path | None, json_file: Path | None) -> int:
    """Prints the findings; returns the exit code."""
    from hora.diag.doctor import report
    from hora.diag.output import check_files
    from hora.train.files import replace_file

    to_terminal = json_file == Path("-")
    if not to_terminal:
        check_files(None, json_file)
    findings = report.examine_host(shared_dir)
    if to_terminal:
        click.echo(report.as_json(findings), nl=False)
    else:
        for line in (*report.as_lines(findings), report.conclusion(findings)):
            click.echo(line)
    if json_file is not None and not to_terminal:
        replace_file(json_file, report.as_json(findings).encode())
    return 1 if any(finding.grade == "wrong" for finding in findings) else 0
