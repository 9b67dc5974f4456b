"""Every code block of the documentation runs, and every figure in it is a row that a bench or a recipe wrote."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from prove_kit import Nest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?P<skip><!-- not run: .+? -->\n)?^```(?P<language>python|bash)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
FIGURES = runpy.run_path(str(ROOT / "tools" / "write_figures.py"))
FIGURE = FIGURES["FIGURE"]
ROW_KEYS = {"what", "value", "unit", "ranks", "machine", "versions", "command", "commit", "samples"}
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=name)
def test_blocks_of_a_page_run(page: Path, prove_nest: Nest, tmp_path: Path) -> None:
    """One page's blocks run in order in one empty directory, as a reader would paste them."""
    # One thread each: while other tests use the cores, threads wait for one another far longer than they compute.
    variables = {"HORA_STATE_DIR": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    work = tmp_path / "work"
    work.mkdir()
    for block in BLOCK.finditer(page.read_text()):
        if block["skip"]:
            continue
        if block["language"] == "python":
            script = tmp_path / "block.py"
            script.write_text(block["code"])
            prove_nest.run_fresh(script, work, tmp_path / "output.txt", 240.0, **variables)
        else:
            run_bash(block["code"], work, variables)


def run_bash(code: str, work: Path, variables: dict[str, str]) -> None:
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | variables
    command = ["bash", "-euo", "pipefail", "-s"]
    result = subprocess.run(command, input=code, cwd=work, env=environ, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, f"{code}\n--- printed ---\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"


def test_every_rank_of_an_example_makes_the_same_data() -> None:
    """Readers start these on several ranks, which would each deal from samples of its own."""
    blocks = [(name(page), block["code"]) for page in PAGES for block in BLOCK.finditer(page.read_text())]
    drawing = [(page, code) for page, code in blocks if "TensorDataset(torch.rand" in code and "hora.DataLoader(" in code]
    assert len(drawing) > 5
    assert [page for page, code in drawing if "manual_seed(" not in code] == []


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_row_says_what_machine_and_command_it_comes_from(path: Path) -> None:
    for row in json.loads(path.read_text()):
        assert row.keys() >= ROW_KEYS, f"{row.get('what')}: lacks {ROW_KEYS - row.keys()}"
        assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", row["commit"]), row["commit"]


@pytest.mark.parametrize("page", [page for page in PAGES if "<!--row" in page.read_text()], ids=name)
def test_figures_of_a_page_are_measured_ones(page: Path) -> None:
    for figure in FIGURE.finditer(page.read_text()):
        assert FIGURES["measured"](figure) == figure[0]


@pytest.mark.parametrize("results", ["launch", "bits"])
def test_a_figure_that_was_not_measured_is_found(results: str) -> None:
    """The check above reads the marks it is meant to read, and sees a digit that the row has not."""
    row = json.loads((ROOT / "benchmarks" / "results" / f"{results}.json").read_text())[0]
    mark = f'<!--row {results} what="{row["what"]}" ranks="{row["ranks"]}"-->'
    value = row["value"]
    shown, other = (value[:12], value[1:13]) if isinstance(value, str) else (f"{value:.2f}", f"{value + 0.01:.2f}")
    for text, right in ((shown, True), (other, False)):
        found = FIGURE.search(f"{mark}{text}<!--/row-->")
        assert found is not None
        assert (FIGURES["measured"](found) == found[0]) is right


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Broken links between pages are warnings, and warnings are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
