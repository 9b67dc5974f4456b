"""The files that a bench is asked to write: refused before anything is measured, and pictures made whole. Loads matplotlib when it draws."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import click

from hora.diag.bench.rows import write_rows
from hora.errors import ConfigError
from hora.launch.report_words import require_different_files, require_writable
from hora.train.files import write_result


def check_files(png: Path | None, json_file: Path | None, html: Path | None = None) -> None:
    """Refuses files that could not be written in the end.

    Raises:
        ConfigError: there is no matplotlib for `png` or `html`, or a file is a directory, or in one that is not there or may not be written,
            or is named twice.
    """
    for word, path in (("--png", png), ("--html", html)):
        if path is not None:
            require_matplotlib(word)
    named = (("--png", png), ("--json", json_file), ("--html", html))
    for word, path in named:
        require_writable(word, path)
    require_different_files(named)


def require_matplotlib(word: str = "--png") -> None:
    """Refuses to go on without it, `word` being what needs it.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{word} needs matplotlib, which is not installed; pip install 'hora[plot]', or leave {word} out")


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches."""
    # The classes are used instead of pyplot, which would choose a window system and keep figures for ever.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def write_png(figure: Any, picture: Path) -> None:
    """Writes a figure into a file, which appears whole.

    Raises:
        ConfigError: it cannot be written there.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    content = BytesIO()
    FigureCanvasAgg(figure).print_figure(content, format="png")
    write_result(picture, content.getvalue())


def svg_of(figure: Any) -> str:
    """A figure as an `<svg>` element for a page, with letters that stay letters, and without the words around it that name places in the network."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    content = BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hora", "font.family": "sans-serif"}):
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(content, metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    text = content.getvalue().decode()
    return text[text.index("<svg") :].strip()


def write_what_was_asked(
    rows: list[dict[str, Any]], png: Path | None, json_file: Path | None, draw: Callable[[Sequence[Mapping[str, Any]], Path], None]
) -> None:
    """Writes the rows and the picture of a bench into the files that were named, and says so."""
    if json_file is not None:
        write_rows(json_file, rows)
        click.echo(f"rows in {json_file}")
    if png is not None:
        draw(rows, png)
        click.echo(f"picture in {png}")
