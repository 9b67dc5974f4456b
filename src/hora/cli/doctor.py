"""`hora doctor`: looks at this machine, and says what to do."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hora.launch.command import join_hosts

if TYPE_CHECKING:
    from hora.diag.doctor.hosts import Request

_HELP = """Looks at this machine, or at several hosts: cores, memory, limits, GPUs and their links, versions, names, interfaces, ports, and what
is open to the network. Of several hosts also: whether each is reached and reaches the others, how fast, and whether versions, code, clocks, names and
directories agree.

Each line is ok, WARNING or WRONG, with what to do. The exit code is 1 if something is wrong, else 0.

\b
  hora doctor
  hora doctor --shared-dir /mnt/team/runs --json doctor.json
  hora doctor -H host1:2,host2:2 --shared-dir /mnt/team/runs      (several hosts, over ssh, and what is between them)
"""


@click.command("doctor", help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--shared-dir", type=click.Path(path_type=Path), metavar="DIR", help="Look at this directory, which all hosts of a job are to see."
)
@click.option(
    "-H",
    "--host",
    "hosts",
    multiple=True,
    callback=join_hosts,
    metavar="HOST:N,...",
    help="Look at these hosts as well as between them, as hora run -H names them.",
)
@click.option("--hostfile", type=click.Path(path_type=Path), metavar="FILE", help="The same as lines `host slots=4`.")
@click.option("--rsh", metavar="COMMAND", help="In place of ssh: COMMAND HOST WORDS... runs WORDS on HOST.")
@click.option("--remote-python", metavar="PATH", help="Python of the other hosts. [the path of this one]")
@click.option("--interface", "--iface", metavar="NAME", help="Network interface between the hosts. [that on the way to them]")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write what was found; - for the terminal.")
def command(shared_dir: Path | None, json_file: Path | None, **words: Any) -> int:
    """Prints the findings; returns the exit code."""
    from hora.diag.doctor import report
    from hora.diag.doctor.hosts import examine_hosts
    from hora.diag.output import check_files
    from hora.train.files import write_result

    to_terminal = json_file == Path("-")
    if not to_terminal:
        check_files(None, json_file)
    request = _request(shared_dir, **words)
    findings = report.examine_host(shared_dir) if request is None else examine_hosts(request)
    if to_terminal:
        click.echo(report.as_json(findings), nl=False)
    else:
        for line in (*report.as_lines(findings), report.conclusion(findings)):
            click.echo(line)
    if json_file is not None and not to_terminal:
        write_result(json_file, report.as_json(findings).encode())
    return 1 if any(finding.grade == "wrong" for finding in findings) else 0


def _request(shared_dir: Path | None, *, hosts: str | None, hostfile: Path | None, **others: str | None) -> "Request | None":
    """What is asked about several hosts; None for this machine alone."""
    from hora.diag.doctor.hosts import Request
    from hora.launch.command import read_named_hosts

    named = read_named_hosts(hosts, hostfile, others)
    return Request(named, shared_dir=shared_dir, **others) if named else None
