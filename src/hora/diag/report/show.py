"""A report as a table for a terminal."""

import io

from rich.console import Console
from rich.table import Table

from hora.diag.report.step_report import Spread, StepReport
from hora.diag.report.wording import ms, percent, say_bytes, say_names

_WIDTH = 110
_PARTS = {
    # field of `Parts`: what it is called
    "outside": "between steps",
    "data": "data wait",
    "compute": "compute (forward, backward)",
    "agreement": "agreement",
    "communication": "exposed communication",
    "update": "update",
    "device": "host waits for the device",
}


def show(report: StepReport) -> str:
    """Lines of text without colours."""
    written = io.StringIO()
    console = Console(file=written, width=_WIDTH, color_system=None, highlight=False, emoji=False, markup=False)
    console.print(_title(report))
    console.print(_times(report))
    for line in _notes(report):
        console.print(line)
    if report.world_size > 1:
        console.print(_ranks(report))
    return f"{written.getvalue()}What to change first: {report.advice}."


def _title(report: StepReport) -> str:
    ranks = f"{report.world_size} rank{'s' if report.world_size > 1 else ''}"
    return (
        f"{report.steps} steps of {ranks} ({report.backend}, {report.device}), the first {report.left_out} left out: "
        f"{ms(report.times.step.median_s)} a step"
    )


def _times(report: StepReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "median", "p95", "of the time"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    graphs = "compute (whole graphs)" if report.replayed > 0.5 else _PARTS["compute"]
    for field, name in {**_PARTS, "compute": graphs}.items():
        spread: Spread = getattr(report.times, field)
        alone = report.world_size == 1 and field in ("agreement", "communication")
        if not alone and (spread.share > 0 or field != "device"):
            table.add_row(name, *_cells(spread))
    table.add_row("step", *_cells(report.times.step))
    return table


def _cells(spread: Spread) -> tuple[str, str, str]:
    return ms(spread.median_s), ms(spread.p95_s), percent(spread.share)


def _notes(report: StepReport) -> list[str]:
    notes = []
    if (bucket := report.bucket) is not None:
        notes.append(
            f"waited for longest: bucket {bucket.index} ({say_names(bucket.names)}; {say_bytes(bucket.size_bytes)}), "
            f"{ms(bucket.wait.median_s)} a step"
        )
    if (bandwidth := report.bandwidth) is not None:
        share = (
            ""
            if bandwidth.measured is None
            else f", {percent(bandwidth.achieved / bandwidth.measured)} of what hora bench allreduce measured"
        )
        notes.append(f"sums: {bandwidth.achieved:.3g} GB/s{share}, in buckets of {say_bytes(bandwidth.bucket_bytes)}")
    if report.replayed > 0:
        notes.append(f"replayed from CUDA graphs: {percent(report.replayed)} of the steps")
    if report.host is not None:
        notes.append(
            f"host: {ms(report.host.median_s)} to start a step; the GPU waited for it in {percent(report.host_bound or 0.0)} of the steps"
        )
    return notes


def _ranks(report: StepReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("rank", "host", "data wait", "compute", "update", "waits for sums", "comes last"):
        table.add_column(column, justify="left" if column == "host" else "right", no_wrap=True)
    for rank in report.ranks:
        times = rank.times
        waits = times.agreement.median_s + times.communication.median_s
        cells = [ms(seconds) for seconds in (times.data.median_s, times.compute.median_s, times.update.median_s, waits)]
        table.add_row(str(rank.rank), rank.host, *cells, percent(rank.last))
    return table
