"""The ring all-reduce as one SVG file: an animated stage, every step as a still below it, and what each rank sends.

Animated by CSS alone, so that it moves inside an `img` too; no script, no font, nothing from the network. What does not move (a printer, a reader who
asked for less motion) shows the end of the animation, and the stills.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from xml.sax.saxutils import escape

from hora.diag.ring.layout import MARGIN, Grid, symbols, use
from hora.diag.ring.story import conclusion, data_sent, letter, phase
from hora.plan import ring
from hora.plan.ring import Contributions, Step

_LONGEST_S, _STEP_S = 60.0, 2.4
_STILL_SCALE = 0.5


def draw(size: int) -> str:
    """The picture for `size` ranks, as SVG."""
    grid, steps = Grid(size), list(ring.steps(size))
    below = grid.bottom + 34
    stills, below = _stills(grid, steps, below) if grid.lettered and steps else ([], below)
    costs, height = _costs(size, below)
    body = chain(_head(grid), symbols(grid), _stage(grid, steps), stills, costs)
    title = f"Ring all-reduce of {size} rank{'s' if size > 1 else ''}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {grid.width} {height}" width="{grid.width}" height="{height}" '
            'role="img" aria-labelledby="title desc" font-family="sans-serif" font-size="13">',
            f'<title id="title">{title}</title>',
            f'<desc id="desc">{escape(_describe(size))}</desc>',
            f"<style>{_style(len(steps), grid.pitch[0])}</style>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            f'<text x="{MARGIN}" y="36" font-size="20" font-weight="bold">{title}</text>',
            *body,
            "</svg>\n",
        ]
    )


def _describe(size: int) -> str:
    return (
        f"{size} ranks stand in a ring; the data of each is cut into {size} chunks. Scatter-reduce: in each of {size - 1} steps every rank sends "
        "one chunk to its right neighbour, which adds it to its own; rank r begins with chunk r and then sends on what it has just received. "
        f"Each rank then has one chunk of the whole sum. All-gather: in {size - 1} more steps these go round. {conclusion(size)}"
    )


def _style(num_steps: int, column: int) -> str:
    """For each step: when its caption shows (c), when its messages go (m), and from when on its results show (s)."""
    rules = ["text{fill:#222}.faint{fill:#666}"]
    if num_steps == 0:
        return rules[0]
    # Two more steps: the beginning, and the end, to look at.
    slot = 100 / (num_steps + 2)
    duration = min(_STEP_S * (num_steps + 2), max(_LONGEST_S, 0.5 * (num_steps + 2)))
    for number in range(num_steps):
        begin, arrive, end = (round(slot * (number + part), 3) for part in (1, 1.65, 2))
        rules += [
            f"@keyframes c{number}{{0%,{begin}%{{opacity:0}}{begin + 0.01:.3f}%,{end}%{{opacity:1}}{end + 0.01:.3f}%,100%{{opacity:0}}}}",
            f"@keyframes m{number}{{0%,{begin}%{{opacity:0;transform:none}}{begin + 0.01:.3f}%{{opacity:1;transform:none}}"
            f"{arrive}%{{opacity:1;transform:translateX({column}px)}}{arrive + 0.01:.3f}%,100%{{opacity:0;transform:translateX({column}px)}}}}",
            f"@keyframes s{number}{{0%,{arrive}%{{opacity:0}}{arrive + 0.01:.3f}%,100%{{opacity:1}}}}",
            "".join(f".{kind}{number}{{animation:{kind}{number} {duration:.1f}s infinite}}" for kind in "cms"),
        ]
    last = round(slot * (num_steps + 1), 3)
    rules += [
        f"@keyframes first{{0%,{slot:.3f}%{{opacity:1}}{slot + 0.01:.3f}%,100%{{opacity:0}}}}.first{{animation:first {duration:.1f}s infinite}}",
        f"@keyframes last{{0%,{last}%{{opacity:0}}{last + 0.01:.3f}%,100%{{opacity:1}}}}.last{{animation:last {duration:.1f}s infinite}}",
        "@media (prefers-reduced-motion:reduce){*{animation:none!important}}",
    ]
    return "".join(rules)


def _head(grid: Grid) -> Iterator[str]:
    """The ranks, the way round, and the chunks."""
    first, last = (grid.place(rank, 0)[0] + grid.cell[0] / 2 for rank in (0, grid.size - 1))
    if grid.size > 1:
        yield (
            f'<path d="M{last} 116V98H{first}V112" fill="none" stroke="#888"/><path d="M{first - 4} 109l4 7 4-7z" fill="#888"/>'
            f'<text x="{MARGIN}" y="102" class="faint">the ring</text>'
        )
    every = 1 if grid.lettered else 4
    for rank in range(0, grid.size, every):
        name = f"rank {rank} ({letter(rank)})" if grid.lettered else str(rank)
        yield f'<text x="{grid.place(rank, 0)[0] + grid.cell[0] / 2}" y="134" text-anchor="middle">{name}</text>'
        yield f'<text x="{MARGIN}" y="{grid.place(0, rank)[1] + grid.cell[1] / 2 + 5}">chunk {rank}</text>'
    if not grid.lettered:
        yield f'<text x="{MARGIN}" y="134">rank</text>'


def _stage(grid: Grid, steps: Sequence[Step]) -> Iterator[str]:
    """The beginning, and upon it, step by step, the messages, what they leave, and what is said of them. At rest it shows the end."""
    size, column = grid.size, grid.pitch[0]
    yield "<g>" + "".join(use((rank,), grid, *grid.place(rank, chunk)) for rank in range(size) for chunk in range(size)) + "</g>"
    before: Sequence[Sequence[Contributions]] = [[(rank,)] * size for rank in range(size)]
    for number, step in enumerate(steps):
        moves = list(enumerate(step.moves))
        landed = "".join(use(step.held[rank][move.received], grid, *grid.place(rank, move.received)) for rank, move in moves)
        # What leaves the last column comes in again before the first.
        sent = [(rank, before[rank][move.sent], move.sent) for rank, move in moves]
        sent.append((-1, before[-1][step.moves[-1].sent], step.moves[-1].sent))
        going = "".join(use(ranks, grid, grid.left + rank * column, grid.place(0, chunk)[1]) for rank, ranks, chunk in sent)
        yield f'<g class="s{number}">{landed}</g><g clip-path="url(#clip)"><g class="m{number}" opacity="0">{going}</g></g>'
        yield _caption(_say(step, number, len(steps)), f"c{number}", hidden=True)
        before = step.held
    if steps:
        yield _caption("Each chunk begins with the values of its own rank.", "first", hidden=True)
    yield _caption(f"In the end every rank has every sum, after {len(steps)} steps.", "last")


def _caption(text: str, name: str, *, hidden: bool = False) -> str:
    seen = ' opacity="0"' if hidden else ""
    return f'<text class="{name}" x="{MARGIN}" y="66" font-size="15"{seen}>{text}</text>'


def _say(step: Step, number: int, num_steps: int) -> str:
    move, half = step.moves[0], num_steps // 2
    what = "each rank adds what comes from its left" if move.adds else "each rank keeps what comes from its left"
    return f"{phase(move).capitalize()}, step {number % half + 1} of {half}: {what}."


def _stills(grid: Grid, steps: Sequence[Step], top: int) -> tuple[list[str], int]:
    """Each step as it is afterwards, with what has just come framed; and where they end."""
    size, head = grid.size, 24
    width, height = (size * pitch * _STILL_SCALE + gap for pitch, gap in zip(grid.pitch, (12, head + 14), strict=True))
    width = max(width, 150)
    in_row = max(1, min(size - 1, int((grid.width - 2 * MARGIN) // width)))
    shown = [f'<text x="{MARGIN}" y="{top}" font-size="15">Every step, as it leaves the ranks; what has just come is framed</text>']
    top += 12
    for half in range(2):
        for index, step in enumerate(steps[half * (size - 1) : (half + 1) * (size - 1)]):
            x, y = MARGIN + index % in_row * width, top + index // in_row * height
            shown.append(f'<text x="{x}" y="{y + 16}" font-size="12">{phase(step.moves[0])} {index + 1}</text>')
            shown.append(f'<g transform="translate({x} {y + head}) scale({_STILL_SCALE})">{_still(grid, step)}</g>')
        top += int(-(-(size - 1) // in_row) * height)
    return shown, top + 30


def _still(grid: Grid, step: Step) -> str:
    (column, row), (width, height) = grid.pitch, grid.cell
    cells = "".join(use(ranks, grid, rank * column, chunk * row) for rank, held in enumerate(step.held) for chunk, ranks in enumerate(held))
    frames = "".join(
        f'<rect x="{rank * column - 4}" y="{move.received * row - 4}" width="{width + 8}" height="{height + 8}" '
        'fill="none" stroke="#d00" stroke-width="3"/>'
        for rank, move in enumerate(step.moves)
    )
    return cells + frames


def _costs(size: int, top: int) -> tuple[list[str], int]:
    """What each rank sends, for several numbers of ranks; and where the picture ends."""
    twice, left, row = 300, MARGIN + 210, 22
    counts = sorted({2, 4, 8, 16, 64} | ({size} if size > 1 else set()))
    shown = [f'<text x="{MARGIN}" y="{top}" font-size="15">Each rank sends 2(n - 1) chunks of 1/n of the data: never twice the data</text>']
    top += 14
    for index, count in enumerate(counts):
        y, sent = top + index * row, data_sent(count)
        weight, colour = ("bold", "#2fae85") if count == size else ("normal", "#bbb")
        shown += [
            f'<text x="{MARGIN}" y="{y + 14}" font-weight="{weight}">{count} ranks: 2 x {count - 1}/{count} = {sent:.2f}</text>',
            f'<rect x="{left}" y="{y + 3}" width="{twice * sent / 2:.1f}" height="14" fill="{colour}"/>',
        ]
    bottom = top + len(counts) * row
    shown.append(
        f'<path d="M{left + twice} {top}V{bottom}" stroke="#d00"/><text x="{left + twice + 6}" y="{top + 14}">twice the data</text>'
    )
    return shown, bottom + MARGIN
