"""A report as one HTML file that needs nothing else: style and pictures stand in it, there are no scripts, and nothing is fetched."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final

from hora.train.files import write_result

_STYLE: Final = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; }
h2 { font-size: 1.15rem; margin-top: 2rem; }
figure { margin: 0; max-width: 40rem; }
figure svg { width: 100%; height: auto; display: block; }
figcaption, footer { color: #555; font-size: .875rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; white-space: nowrap; }
td:last-child { white-space: normal; min-width: 12rem; }
code { overflow-wrap: anywhere; }
"""
# Whoever opens the file is safe from it: its browser fetches nothing, whatever stands in it.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


class Page:
    """What a page says, from its top to its bottom."""

    def __init__(self, title: str) -> None:
        self._title = escape(title)
        self._parts: list[str] = []

    def figure(self, heading: str, svg: str, caption: str) -> None:
        """Adds a picture, `svg` as of `hora.diag.output.svg_of`."""
        self._add(heading, f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>")

    def table(self, heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Adds a table; on a narrow screen it is moved sideways, and not the page."""
        head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        self._add(heading, f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')

    def list(self, heading: str, sentences: Sequence[str]) -> None:
        """Adds sentences."""
        self._add(heading, f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>")

    def origin(self, machine: str, versions: Mapping[str, str], commit: str, command: str) -> None:
        """Adds where all this was measured, and how to measure it again."""
        told = ", ".join(f"{name} {version}" for name, version in versions.items())
        self._parts.append(
            f"<footer><p>{escape(machine)}; {escape(told)}, commit {escape(commit)}</p><p><code>{escape(command)}</code></p></footer>"
        )

    def html(self) -> str:
        """The whole."""
        return (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{self._title}</title>\n<style>{_STYLE}</style></head>\n'
            f"<body><h1>{self._title}</h1>\n{chr(10).join(self._parts)}\n</body></html>\n"
        )

    def _add(self, heading: str, content: str) -> None:
        self._parts.append(f"<section><h2>{escape(heading)}</h2>{content}</section>")


def write_page(page: Page, path: Path) -> None:
    """Writes the page, which appears whole.

    Raises:
        ConfigError: it cannot be written there.
    """
    write_result(path, page.html().encode(errors="replace"))  # names of files in a command need not be UTF-8
