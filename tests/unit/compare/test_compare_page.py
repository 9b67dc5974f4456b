"""The page that `hora compare --html` and `hora scale --html` write: whole in itself, and shown by a browser as it is meant."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hora.compare.kinds import KINDS
from hora.compare.request import REFERENCE, Request
from hora.compare.result import Outcome
from hora.compare.show import write_html
from hora.diag.page import Page, write_page
from hora.diag.scale.point import PARTS, Point
from hora.diag.scale.result import conclude
from hora.diag.scale.show import write_html as write_scale_html

pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hora[plot]'")

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--window-size=400,2600",
)  # fmt: skip
REQUEST = Request("image", None, None, (), (REFERENCE, "ddp", "overlap"), 2, 40, 2, on_gpus=False, threads=1, dropout=False)
SINGLE = Outcome(
    REFERENCE, 1, (1.0, 1.1), 1.0, 1.0, None, tuple(3 / (i + 1) for i in range(len(REQUEST.stretches()))), 0.3, 0.9, 0.0, 1e-5, None, None, "solo",
    "cpu", None,
)  # fmt: skip
OUTCOMES = [
    SINGLE,
    replace(
        SINGLE, variant="ddp", devices=2, times_s=(0.7, 0.8), speed_up=1.4, efficiency=0.7, waiting=0.1, difference=0.02, departs_at=17
    ),
    replace(SINGLE, variant="overlap", devices=2, times_s=(0.6, 0.65), speed_up=1.68, efficiency=0.84, waiting=0.05, difference=1e-6),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(OUTCOMES, KINDS["image"], REQUEST, "image digits on 2", ["A note with <b> & more."], ["hora", "compare", "image"], path)
    return path


def fetched(html: str) -> list[str]:
    """What a browser would look for elsewhere: anything but a place in the page itself, or bytes that stand in it."""
    places = re.findall(r"""(?:\b(?:xlink:)?href|\bsrc|\bsrcset|\bdata|\bposter|\baction)\s*=\s*["']?([^"'\s>]*)""", html)
    places += re.findall(r"""url\(\s*["']?([^"')]*)""", html) + re.findall(r"@import[^;]*", html)
    return [place for place in places if not place.startswith(("#", "data:"))] + re.findall(r"<(?:script|iframe|link|object|embed)\b", html)


def require_whole(html: str) -> None:
    """Nothing is fetched, and both pictures are there with what they show."""
    assert fetched(html) == []
    pictures = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(pictures) == 2
    for words in (("ddp", "overlap", "1.68x", "differs", "training time"), ("training loss", "step", "ddp")):
        assert any(all(word in picture for word in words) for picture in pictures), words
    assert all(picture.count("<path") > 5 for picture in pictures)


def test_a_page_is_whole_in_itself(page: Path) -> None:
    html = page.read_text(encoding="utf-8")
    require_whole(html)
    assert "A note with &lt;b&gt; &amp; more." in html
    assert "differs by 2e-02, by step 17" in html
    assert "hora compare image" in html
    assert 'name="viewport"' in html


@pytest.mark.parametrize(
    "planted",
    [
        '<script src="https://cdn.example/x.js"></script>', "<script>1</script>", '<img src="http://example.org/a.png">', "<img src=//example.org/a>",
        "<style>@import 'https://example.org/a.css';</style>", "<i style=\"background:url('https://example.org/a.png')\"></i>",
    ],
)  # fmt: skip
def test_what_would_be_fetched_is_found(planted: str, page: Path) -> None:
    html = page.read_text(encoding="utf-8")
    with pytest.raises(AssertionError):
        require_whole(html.replace("</body>", f"{planted}</body>"))


def test_a_page_without_its_chart_is_found(page: Path) -> None:
    html = page.read_text(encoding="utf-8")
    with pytest.raises(AssertionError):
        require_whole(re.sub(r"<svg.*?</svg>", "", html, count=1, flags=re.DOTALL))


def test_scale_writes_such_a_page(tmp_path: Path) -> None:
    parts = dict.fromkeys(PARTS, 0.0) | {"compute": 0.01}
    points = [Point(ranks, (0.01 / ranks,), parts, 0.0, (4096,), "gloo", "cpu", 0.0, "Do less.", 40) for ranks in (1, 2)]
    write_scale_html(conclude("train", "strong", points, [], [], 8), ["hora", "scale", "train.py"], tmp_path / "scale.html")
    html = (tmp_path / "scale.html").read_text(encoding="utf-8")
    assert fetched(html) == []
    assert html.count("<svg") == 2
    assert "Do less." in html
    assert "Predicted" in html


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here: apt-get install chromium")
def test_a_browser_shows_the_page(page: Path, tmp_path: Path) -> None:
    def browse(*words: str) -> str:
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *words, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    require_whole(browse("--dump-dom"))
    browse(f"--screenshot={tmp_path / 'page.png'}")
    from matplotlib.image import imread

    shown = imread(tmp_path / "page.png")[:, :, :3]
    for colour in ((0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)):  # bars that agree, and that do not
        assert (abs(shown * 255 - colour).max(axis=2) < 8).sum() > 200
    assert "matplotlib.pyplot" not in sys.modules


def test_words_cannot_leave_their_place() -> None:
    page = Page("<script>alert(1)</script>")
    page.table("</h2>", ["<a href=x>"], [["<img src=x>"]])
    page.origin("m", {}, "c", "'\"><script>")
    assert not re.search(r"<(?:script|img|a)\b", page.html())


def test_a_command_may_name_what_is_no_unicode(tmp_path: Path) -> None:
    page = Page("A study")
    page.origin("m", {}, "hora compare lm --html caf\udcff.html", "")
    write_page(page, tmp_path / "page.html")
    assert "--html caf?.html" in (tmp_path / "page.html").read_text(encoding="utf-8")
