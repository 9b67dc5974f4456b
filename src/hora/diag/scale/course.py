"""A study from its request to what is printed and written."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from hora.diag.bench.rows import rows, write_rows
from hora.diag.prove.inquiry import Inquiry
from hora.diag.prove.request import Request as Proof
from hora.diag.prove.run import ProveError, Runner
from hora.diag.prove.show import exit_code
from hora.diag.prove.show import show as show_proof
from hora.diag.scale.point import Point
from hora.diag.scale.request import Request
from hora.diag.scale.result import Result, conclude
from hora.diag.scale.show import draw, show, write_html
from hora.diag.scale.study import ScaleError, Study, measure_sums, read_timings, require_sums
from hora.diag.scale.wire import Sum, fit, sums_of

_STEPS_COMPARED = 3
_WIDTH = 120


def scale(
    request: Request, *, timings: Path | None, check: bool, json_file: Path | None, png: Path | None, html: Path | None = None
) -> int:
    """Makes the study; returns 0, 1 if ranks do not train the same model, 2 if it could not be made."""
    differs = 0
    try:
        given = None if timings is None else read_timings(timings)
        if check and request.kind == "strong":
            differs = _compare(request)
        result, problem = _study(request, given)
    except (ScaleError, ProveError) as error:
        click.echo(f"hora scale: {error}", err=True)
        return 2
    # Lines that a narrow window breaks say more than names of columns cut short.
    show(Console(width=max(Console().width, _WIDTH)), result)
    if request.kind == "weak":
        click.echo("With --weak the global batches differ, so whether all numbers of ranks train the same model is not checked.")
        if len({request.words_for(ranks) for ranks in request.ranks}) == 1:
            click.echo(
                "No argument has {ranks} in it, so the script itself must give each rank the same batch: where its global batch stays the same "
                "instead, the speed-up shown is too large by the number of ranks."
            )
    if json_file is not None:
        write_rows(json_file, rows(result.measurements(), _command(request)))
        click.echo(f"rows in {json_file}")
    if png is not None:
        draw(result, png)
        click.echo(f"picture in {png}")
    if html is not None:
        write_html(result, _command(request), html)
        click.echo(f"page in {html}")
    if problem is not None:
        click.echo(f"hora scale: nothing is predicted: {problem}", err=True)
        return 2
    return differs


def _study(request: Request, timings: Sequence[Mapping[str, Any]] | None) -> tuple[Result, ScaleError | None]:
    """What was measured, with what was asked to be predicted or why it cannot be: the runs, which took long, are shown all the same."""
    points = Study(request, _say).measure()
    measured, problem = [], None
    if len(points) > 1 and (request.to is not None or len(points) > 2):
        try:
            measured = _sums(points, request, timings)
        except ScaleError as error:
            problem = error
    smaller = [one for one in measured if one.ranks < points[-1].ranks]
    to = None if problem else request.to
    return conclude(Path(request.words[0]).stem, request.kind, points, fit(measured), fit(smaller), to), problem


def _sums(points: list[Point], request: Request, timings: Sequence[Mapping[str, Any]] | None) -> list[Sum]:
    last = points[-1]
    if timings is not None:
        return require_sums(timings, last.backend, last.device)
    _say("sums by themselves")
    return sums_of(measure_sums(points, request.directory), last.backend, last.device)


def _compare(request: Request) -> int:
    """Whether the numbers of ranks train the same model, as `hora prove` says; shows it if they do not."""
    proof = Proof(
        words=request.words,
        ranks=request.ranks,
        steps=_STEPS_COMPARED,
        module=request.module,
        directory=request.directory / "prove",
        timeout_s=request.timeout_s,
    )
    inquiry = Inquiry(Runner(proof, environ=dict(os.environ)), _say)
    inquiry.reference()
    answers = [inquiry.answer(ranks) for ranks in proof.ranks[1:]]
    code = exit_code(proof, answers)
    if code:
        show_proof(Console(), proof, answers)
    else:
        click.echo(f"All numbers of ranks train the same model ({_STEPS_COMPARED} steps compared).")
    return code


def _say(doing: str) -> None:
    click.echo(f"{doing} ...", err=True)


def _command(request: Request) -> list[str]:
    options = ["--weak"] * (request.kind == "weak") + ["--ranks", ",".join(map(str, request.ranks)), "--repeats", str(request.repeats)]
    to = [] if request.to is None else ["--to", str(request.to)]
    return ["hora", "scale", *options, *to, *["-m"] * request.module, *request.words]
