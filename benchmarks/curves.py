"""Draws the perplexities of several runs in one picture: python benchmarks/curves.py OUT.png LABEL=RUN_DIRECTORY...

Training is a line, validation a point at the end of each epoch.
"""

import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hora.train.metrics import read_metrics

picture, *named = sys.argv[1:]
figure = Figure(figsize=(7, 4), layout="tight")
axes = figure.add_subplot()
for number, (label, directory) in enumerate(name.split("=", 1) for name in named):
    rows = list(read_metrics(Path(directory) / "metrics.jsonl"))
    for split, style in (("train", {"linewidth": 1.2}), ("valid", {"marker": "o", "linestyle": "none"})):
        points = [(row["step"], row["perplexity"]) for row in rows if row["split"] == split]
        axes.plot(*zip(*points, strict=True), label=f"{label}, {split}", color=f"C{number}", **style)
axes.set(xlabel="step", ylabel="perplexity", yscale="log")
axes.grid(alpha=0.3, which="both")
axes.legend(fontsize=8)
FigureCanvasAgg(figure)
figure.savefig(picture, dpi=110)
