"""The picture, read as XML: what it needs, what it says, and that no text stands on another."""

import re
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path

import pytest

from hora.diag.ring.picture import draw
from hora.plan import ring

SVG = "{http://www.w3.org/2000/svg}"
SIZES = (1, 2, 3, 4, 8, 9, 16, 64)


def by_class(root: ET.Element) -> dict[str, ET.Element]:
    return {element.get("class"): element for element in root.iter() if element.get("class")}


@pytest.mark.parametrize("size", SIZES)
def test_it_needs_nothing_but_itself(size):
    text = draw(size)
    root = ET.fromstring(text)
    names = {element.get("id") for element in root.iter()}
    assert {element.get("href") for element in root.iter(f"{SVG}use")} <= {f"#{name}" for name in names}
    assert "script" not in text
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert len(text) < 1_000_000


@pytest.mark.parametrize("size", SIZES)
def test_it_is_described_for_those_who_do_not_see_it(size):
    root = ET.fromstring(draw(size))
    assert root.get("role") == "img"
    assert [child.tag for child in root[:2]] == [f"{SVG}title", f"{SVG}desc"]
    assert f"{size} rank" in root[0].text
    assert "Scatter-reduce" in root[1].text
    assert "All-gather" in root[1].text


@pytest.mark.parametrize("size", [2, 4, 9])
def test_each_step_leaves_what_the_schedule_says(size):
    drawn = by_class(ET.fromstring(draw(size)))
    for number, step in enumerate(ring.steps(size)):
        landed = [use.get("href") for use in drawn[f"s{number}"]]
        held = [step.held[rank][move.received] for rank, move in enumerate(step.moves)]
        assert landed == [f"#k{ranks[0]}-{len(ranks)}" if size <= 8 else f"#k{len(ranks)}" for ranks in held]
        # One message a rank, and that of the last rank once more, where it comes in at the other side.
        assert len(drawn[f"m{number}"]) == size + 1
    assert f"s{2 * (size - 1)}" not in drawn


def test_what_stands_still_shows_the_end_and_every_step():
    root = ET.fromstring(draw(4))
    drawn = by_class(root)
    hidden = {name for name, element in drawn.items() if element.get("opacity") == "0"}
    assert hidden == {f"{kind}{number}" for kind in "cm" for number in range(6)} | {"first"}
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert [text for text in texts if re.fullmatch(r"(scatter-reduce|all-gather) \d", text or "")] == [
        *(f"scatter-reduce {number}" for number in (1, 2, 3)),
        *(f"all-gather {number}" for number in (1, 2, 3)),
    ]


@pytest.mark.parametrize("size", SIZES)
def test_no_text_stands_on_another_or_outside(size):
    root = ET.fromstring(draw(size))
    boxes = []
    for element in root:
        if element.tag == f"{SVG}text" and element.get("opacity") != "0":
            height = float(element.get("font-size", "13"))
            # No common font is wider than 0.66 of its height on the average, in bold.
            width = len(element.text) * height * (0.66 if element.get("font-weight") == "bold" else 0.58)
            left = float(element.get("x")) - (width / 2 if element.get("text-anchor") == "middle" else 0)
            boxes.append((left, float(element.get("y")) - height, left + width, float(element.get("y")), element.text))
    assert len(boxes) > 5
    for left, _, right, bottom, text in boxes:
        assert left >= 0, text
        assert right <= float(root.get("width")), text
        assert bottom <= float(root.get("height")), text
    for one, other in combinations(boxes, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, f"{one[4]!r} stands on {other[4]!r}"


def test_the_picture_of_the_documentation_is_this_one():
    assert (Path(__file__).parents[4] / "docs" / "images" / "ring.svg").read_text() == draw(4)
