"""`hora checkpoint`: what stands in checkpoints, whether it is whole, and its tensors for other programs, or the mean of several."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hora.recipes.vocabularies import require_same_vocabularies
from hora.train.checkpoint import inspection
from hora.train.checkpoint.inspection import Finding

_SETTINGS = {"help_option_names": ["-h", "--help"]}
_HELP = """Shows, verifies, exports and averages checkpoints. PATH is a checkpoint, a directory of checkpoints, or the directory of a run.

\b
  hora checkpoint show runs/lm-small
  hora checkpoint verify runs/lm-small
  hora checkpoint export runs/lm-small --entry model --to model.safetensors
  hora checkpoint average runs/nmt-a --last 5 --to runs/nmt-a/mean.safetensors
"""
_SHOW_HELP = """Shows what checkpoints hold: several as a table, one with its facts and the shapes of its tensors.

Sizes are compared, not every byte: that is `hora checkpoint verify`.

\b
  hora checkpoint show runs/lm-small
  hora checkpoint show runs/lm-small/checkpoints/step-00001200.g0
"""
_VERIFY_HELP = """Reads every byte of each checkpoint and compares the digests.

Exit code 0: all are whole; 1: one is damaged, and its damaged files are named; 2: there is none.

\b
  hora checkpoint verify runs/lm-small
"""
_EXPORT_HELP = """Writes the tensors of an entry into a new safetensors file, which appears whole or not at all.

Of several checkpoints the newest is taken; each of its bytes is verified.

\b
  hora checkpoint export runs/lm-small --entry model --to model.safetensors
  hora checkpoint export runs/lm-small/checkpoints/step-00001200.g0 --to half.safetensors --dtype bfloat16
"""
_AVERAGE_HELP = """Writes the mean of the weights of several checkpoints into a new safetensors file, which appears whole or not at all.

Means are made in float64; each byte read is verified. The file is what --init-from, and in the directory of a run `hora translate`, take.
Of several runs all must have the same vocabularies.

\b
  hora checkpoint average runs/nmt-a --last 5 --to runs/nmt-a/mean.safetensors
  hora checkpoint average runs/nmt-a/checkpoints/step-00001000.g0 runs/nmt-a/checkpoints/step-00001200.g0 --to mean.safetensors
"""
_JSON = click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write what is printed.")
_PATH = click.argument("path", type=click.Path(path_type=Path))


@click.group("checkpoint", help=_HELP, context_settings=_SETTINGS)
def command() -> None:
    """The group itself does nothing."""


@command.command("show", help=_SHOW_HELP, short_help="What checkpoints hold.", context_settings=_SETTINGS)
@_PATH
@_JSON
def show(path: Path, json_file: Path | None) -> None:
    """Prints a table, or one checkpoint."""
    findings = [inspection.inspect(found, every_byte=False) for found in inspection.find(path)]
    alone = findings[0] if findings[0].path == path else None
    click.echo("\n".join(_page(alone) if alone else _table(findings)))
    _write(json_file, [_as_row(finding) | ({"entries": _entries(finding)} if alone else {}) for finding in findings])


@command.command("verify", help=_VERIFY_HELP, short_help="Every byte against its digest.", context_settings=_SETTINGS)
@_PATH
@_JSON
def verify(path: Path, json_file: Path | None) -> int:
    """Prints a line for each checkpoint; returns the exit code."""
    findings = []
    for found in inspection.find(path):
        finding = inspection.inspect(found, every_byte=True)
        findings.append(finding)
        click.echo(f"{finding.path.name}  {_state(finding)}")
    _write(json_file, [_as_row(finding) for finding in findings])
    return 1 if any(finding.damage for finding in findings) else 0


@command.command("export", help=_EXPORT_HELP, short_help="An entry as a plain safetensors file.", context_settings=_SETTINGS)
@_PATH
@click.option("--entry", default="model", show_default=True, metavar="NAME", help="Whose tensors.")
@click.option("--to", required=True, type=click.Path(path_type=Path), metavar="FILE", help="A new file.")
@click.option("--strip", default="", metavar="WORD", help="Take this off the beginning of names, such as `module.`.")
@click.option("--prefix", default="", metavar="WORD", help="Put this before all names.")
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="What floating-point tensors become. [as they are]")
@_JSON
def export(path: Path, entry: str, to: Path, strip: str, prefix: str, dtype: str | None, json_file: Path | None) -> None:
    """Writes the file."""
    from hora.train.checkpoint import export as exporting  # loads torch

    checkpoint, count = exporting.export(path, entry, to, strip=strip, prefix=prefix, dtype=dtype)
    click.echo(f"{count} tensors of {entry!r} in {checkpoint} are in {to}")
    _write(json_file, {"checkpoint": str(checkpoint), "entry": entry, "tensors": count, "file": str(to)})


@command.command("average", help=_AVERAGE_HELP, short_help="The mean of several.", context_settings=_SETTINGS)
@click.argument("paths", type=click.Path(path_type=Path), metavar="PATH...", nargs=-1, required=True)
@click.option("--to", required=True, type=click.Path(path_type=Path), metavar="FILE", help="A new file.")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Of a PATH with several the newest N. [all]")
@click.option("--entry", default="model", show_default=True, metavar="NAME", help="Whose tensors.")
@_JSON
def average(paths: tuple[Path, ...], to: Path, last: int | None, entry: str, json_file: Path | None) -> None:
    """Writes the file."""
    from hora.train.checkpoint import averaging  # loads torch

    checkpoints = averaging.choose(paths, last)
    require_same_vocabularies(checkpoints)
    count = averaging.average(checkpoints, entry, to)
    click.echo(f"the mean of {count} tensors of {entry!r} over {len(checkpoints)} checkpoints is in {to}")
    _write(json_file, {"checkpoints": list(map(str, checkpoints)), "entry": entry, "tensors": count, "file": str(to)})


def _table(findings: Sequence[Finding]) -> list[str]:
    rows: list[tuple[str, ...]] = [("step", "epoch", "metric", "size", "generation", "state")]
    for finding in findings:
        facts = finding.manifest
        numbers = (facts.step, facts.epoch, _metric(facts.metric), _size(finding.size_bytes), facts.generation) if facts else ("?",) * 5
        rows.append((*map(str, numbers), f"{finding.path.name}: {_state(finding)}"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return ["  ".join([*(cell.rjust(width) for cell, width in zip(row[:5], widths, strict=True)), row[5]]) for row in rows]


def _page(finding: Finding) -> list[str]:
    """One checkpoint with all that is known of it."""
    lines = [f"{finding.path}: {_state(finding)}"]
    if (facts := finding.manifest) is None:
        return lines
    lines += [
        f"  step {facts.step}, epoch {facts.epoch} (counted from 0), metric {_metric(facts.metric)}, generation {facts.generation}",
        f"  written {facts.created} by hora {facts.hora} and torch {facts.torch} on {facts.world_size} ranks ({facts.device})",
        f"  exact mode: {facts.exact or 'no'}; logical ranks: {facts.logical_ranks}; size: {_size(finding.size_bytes)}",
    ]
    for entry, tensors in _entries(finding).items():
        lines += ["", f"  {entry}: {len(tensors)} tensors"]
        width = max(map(len, tensors), default=0)
        lines += [f"    {name:{width}}  {facts['dtype']:>4}  {facts['shape']}" for name, facts in tensors.items()]
    return lines


def _entries(finding: Finding) -> dict[str, dict[str, Any]]:
    """The tensors of each entry whose file is there."""
    sound = [entry for entry in finding.entries if f"{entry}.safetensors" not in finding.damage]
    return {entry: {name: asdict(facts) for name, facts in inspection.tensors_of(finding.path, entry).items()} for entry in sound}


def _state(finding: Finding) -> str:
    if finding.is_newer:
        return "; ".join(finding.damage.values())
    return "damaged: " + "; ".join(f"{name} {what}" for name, what in finding.damage.items()) if finding.damage else "whole"


def _metric(metric: float | None) -> str:
    return "-" if metric is None else f"{metric:.6g}"


def _size(size_bytes: int) -> str:
    from hora.diag.report.wording import say_bytes

    return say_bytes(size_bytes)


def _as_row(finding: Finding) -> dict[str, Any]:
    row = {"path": str(finding.path), "whole": not finding.damage, "damage": finding.damage, "size_bytes": finding.size_bytes}
    return row | {"manifest": asdict(finding.manifest) if finding.manifest else None}


def _write(path: Path | None, content: Any) -> None:
    """Writes a file that appears whole or not at all.

    Raises:
        ConfigError: it cannot be written there.
    """
    from hora.train.files import write_result

    if path is not None:
        write_result(path, (json.dumps(content, indent=1) + "\n").encode())
