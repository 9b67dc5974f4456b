"""Where the parts of the picture stand, and what a chunk looks like: a rectangle for each rank whose values are in it."""

from collections.abc import Iterator
from dataclasses import dataclass

from hora.diag.ring.story import MOST_LETTERS, letter
from hora.plan.ring import Contributions

MARGIN = 24
_LABEL = 74
# Okabe and Ito's colours, which colour-blind people tell apart; all light enough for black letters.
_COLOURS = ("#e69f00", "#56b4e9", "#2fae85", "#f0e442", "#6f9fd8", "#e07b39", "#d79abf", "#b8b8b8")


@dataclass(frozen=True)
class Grid:
    """Where things are on the stage: a column a rank, a row a chunk, from `top` on."""

    size: int
    top: int = 150

    @property
    def lettered(self) -> bool:
        """Whether chunks show letters."""
        return self.size <= MOST_LETTERS

    @property
    def part(self) -> int:
        """Width of what one rank has added to a chunk."""
        return 18 if self.lettered else 0

    @property
    def cell(self) -> tuple[int, int]:
        """Width and height of a chunk."""
        return (self.size * self.part + 4, 26) if self.lettered else (22, 10)

    @property
    def pitch(self) -> tuple[int, int]:
        """From one column, or row, to the next."""
        return (max(self.cell[0] + 26, 92), self.cell[1] + 8) if self.lettered else (self.cell[0] + 6, self.cell[1] + 2)

    @property
    def left(self) -> int:
        """Where the first column begins."""
        return MARGIN + _LABEL

    @property
    def right(self) -> int:
        """Where the last column ends."""
        return self.left + self.size * self.pitch[0]

    @property
    def bottom(self) -> int:
        """Where the last row ends."""
        return self.top + self.size * self.pitch[1]

    @property
    def width(self) -> int:
        """Of the picture."""
        return max(self.right + MARGIN, 760)

    def place(self, rank: int, chunk: int) -> tuple[int, int]:
        """Where a chunk of a rank stands."""
        return self.left + rank * self.pitch[0], self.top + chunk * self.pitch[1]


def symbols(grid: Grid) -> Iterator[str]:
    """What chunks look like, by who is in them: the sums on their way are of ranks in a row round the ring."""
    yield "<defs>"
    for start in range(grid.size if grid.lettered else 1):
        for count in range(1, grid.size + 1):
            ranks = tuple((start + offset) % grid.size for offset in range(count))
            yield f'<g id="{_name(ranks, grid)}">{"".join(_chunk(ranks, grid))}</g>'
    left, top = grid.left - 13, grid.top - 2
    yield f'<clipPath id="clip"><rect x="{left}" y="{top}" width="{grid.size * grid.pitch[0]}" height="{grid.bottom - top}"/></clipPath></defs>'


def _name(ranks: Contributions, grid: Grid) -> str:
    return f"k{ranks[0]}-{len(ranks)}" if grid.lettered else f"k{len(ranks)}"


def _chunk(ranks: Contributions, grid: Grid) -> Iterator[str]:
    (width, height), whole = grid.cell, len(ranks) == grid.size
    if not grid.lettered:
        # From pale to blue with each rank; whole ones green.
        shade = 235 - round(170 * len(ranks) / grid.size)
        yield f'<rect width="{width}" height="{height}" fill="{"#2fae85" if whole else f"rgb({shade},{shade + 10},245)"}"/>'
        return
    yield f'<rect width="{width}" height="{height}" fill="#fff" stroke="{"#111" if whole else "#bbb"}" stroke-width="{2 if whole else 1}"/>'
    for rank in ranks:
        left = 2 + rank * grid.part
        yield f'<rect x="{left}" y="2" width="{grid.part}" height="{height - 4}" fill="{_COLOURS[rank]}"/>'
        yield f'<text x="{left + grid.part / 2}" y="{height / 2 + 4}" text-anchor="middle">{letter(rank)}</text>'


def use(ranks: Contributions, grid: Grid, x: float, y: float) -> str:
    """A chunk that has the values of `ranks`."""
    return f'<use href="#{_name(ranks, grid)}" x="{x}" y="{y}"/>'
