"""What `hora ring` tells: the steps in words, as a table, as lines, as JSON.

Letters stand for ranks: `bc` is the sum of what ranks 1 and 2 had. Where there are too many ranks for letters, they are counted.
"""

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.table import Table

from hora.errors import ConfigError
from hora.plan import ring
from hora.plan.ring import Contributions, Move

MOST_RANKS = 64
MOST_LETTERS = 8
"""Up to so many ranks, what is in a chunk is shown by letters."""


def check_size(size: int) -> None:
    """Refuses numbers of ranks that cannot be shown.

    Raises:
        ConfigError: there are none, or too many.
    """
    if not 1 <= size <= MOST_RANKS:
        raise ConfigError(f"--ranks must be from 1 to {MOST_RANKS}, but is {size} instead")


def phase(move: Move) -> str:
    """The half of the all-reduce that a move belongs to."""
    return "scatter-reduce" if move.adds else "all-gather"


def letter(rank: int) -> str:
    """What stands for the values of `rank`."""
    return "abcdefgh"[rank]


def say_contributions(ranks: Contributions, size: int) -> str:
    """`bc`, or `2/64` where ranks have no letters."""
    return "".join(map(letter, ranks)) if size <= MOST_LETTERS else f"{len(ranks)}/{size}"


class Row(NamedTuple):
    """What one rank does in one step, and has afterwards."""

    step: str
    rank: str
    sends: str
    receives: str
    holds: str


def rows(size: int) -> Iterator[list[Row]]:
    """The rows of each step."""
    before: Sequence[Sequence[Contributions]] = [[(rank,)] * size for rank in range(size)]
    for number, step in enumerate(ring.steps(size), start=1):
        yield [
            Row(
                f"{number} {phase(move)}",
                str(rank),
                f"chunk {move.sent} ({say_contributions(before[rank][move.sent], size)}) to {(rank + 1) % size}",
                f"chunk {move.received} from {(rank - 1) % size}, {'adds it' if move.adds else 'keeps it'}",
                _say_held(step.held[rank], move, size),
            )
            for rank, move in enumerate(step.moves)
        ]
        before = step.held


def _say_held(held: Sequence[Contributions], move: Move, size: int) -> str:
    if size <= MOST_LETTERS:
        return " ".join(say_contributions(chunk, size) for chunk in held)
    done = sum(len(chunk) == size for chunk in held)
    return f"chunk {move.received}: {say_contributions(held[move.received], size)}; {done} of {size} chunks whole"


def headings(size: int) -> Row:
    """What stands above the columns."""
    return Row("step", "rank", "sends", "receives", f"holds{', by chunk' if size <= MOST_LETTERS else ''}")


def table(size: int) -> Table:
    """All steps for a terminal."""
    shown = Table(*headings(size), title=f"Ring all-reduce of {size} rank{'s' if size > 1 else ''}", title_justify="left")
    for step in rows(size):
        for row in step:
            shown.add_row(row.step if row.rank == "0" else "", *row[1:], style="" if "reduce" in row.step else "green")
        shown.add_section()
    return shown


def lines(size: int) -> Iterator[str]:
    """All steps for a file or a pipe: one line a rank and step, in columns."""
    every = [headings(size), *(row for step in rows(size) for row in step)]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    for row in every:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def data_sent(size: int) -> float:
    """How much each rank sends, in multiples of the data."""
    return 2 * (size - 1) / size


def conclusion(size: int) -> str:
    """What to learn from it."""
    if size == 1:
        return "A rank alone has nothing to send."
    return (
        f"Each rank has sent {2 * (size - 1)} chunks of 1/{size} of the data: 2 x {size - 1}/{size} = {data_sent(size):.2f} times the data. "
        "However many ranks there are, it is less than 2."
    )


def as_json(size: int) -> str:
    """The schedule; `then_holds` are the ranks whose values are in the chunk received, in the order in which they were added."""
    steps = [
        {
            "step": number,
            "phase": phase(step.moves[0]),
            "moves": [
                {
                    "rank": rank,
                    "sends": move.sent,
                    "to": (rank + 1) % size,
                    "receives": move.received,
                    "from": (rank - 1) % size,
                    "adds": move.adds,
                    "then_holds": step.held[rank][move.received],
                }
                for rank, move in enumerate(step.moves)
            ],
        }
        for number, step in enumerate(ring.steps(size), start=1)
    ]
    return (
        json.dumps({"ranks": size, "chunks_sent_by_each_rank": 2 * (size - 1), "data_sent_by_each_rank": data_sent(size), "steps": steps})
        + "\n"
    )
