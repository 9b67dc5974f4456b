"""The curve of a run as a picture, drawn from its `metrics.jsonl`."""

from io import BytesIO
from pathlib import Path
from typing import Final

from hora import log
from hora.train.files import replace_file
from hora.train.metrics import read_metrics

_MOST: Final = 1e100
"""No axis reaches from a usual value to a larger one, and that of a run that has gone astray need not be seen."""


def draw_curve(metrics: Path, picture: Path, *, value: str = "perplexity") -> bool:
    """Draws `value` over the steps, one line for each split, into a PNG; returns whether it could.

    Without matplotlib, without a number to draw, or where the disk refuses, nothing is written and a log line says why.
    """
    curves: dict[str, tuple[list[int], list[float]]] = {}
    try:
        for row in read_metrics(metrics):
            if row.get(value) is not None and abs(row[value]) < _MOST:
                steps, values = curves.setdefault(row["split"], ([], []))
                steps.append(row["step"])
                values.append(row[value])
    except OSError as error:
        log.get_logger().warning("%s was not drawn: %s cannot be read: %s", picture, metrics, error)
        return False
    if not curves:
        log.get_logger().info("%s was not drawn: %s has no %s", picture, metrics, value)
        return False
    try:
        # The classes are used instead of pyplot, which would choose a window system and keep figures for ever.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        log.get_logger().info("%s was not drawn: matplotlib is not installed; pip install 'hora[plot]'", picture)
        return False
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel=value, yscale="log" if value == "perplexity" else "linear")
    for split, (steps, values) in curves.items():
        axes.plot(steps, values, label=split, marker="o" if len(steps) < 50 else None, markersize=3)
    axes.legend()
    axes.grid(visible=True, which="both", alpha=0.3)
    content = BytesIO()
    FigureCanvasAgg(figure).print_figure(content, format="png")
    try:
        replace_file(picture, content.getvalue())
    except OSError as error:
        log.get_logger().warning("%s could not be written: %s", picture, error)
        return False
    return True
