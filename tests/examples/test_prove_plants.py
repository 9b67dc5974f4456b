"""`hora prove` on scripts with one fault each, and on scripts that are right: what it says is what their first line expects."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prove_kit import ForkingStarter

from hora.diag.prove.inquiry import Answer, Inquiry
from hora.diag.prove.request import Request
from hora.diag.prove.run import Runner
from hora.testing.pool import RankPools

PLANTS = Path(__file__).parent / "prove"
ARGUMENTS = json.loads((PLANTS / "args.json").read_text())
HARMLESS = {"order-of-summation"}


def expected(script: Path) -> list[str]:
    found = re.match(r"# expect: (.+)", script.read_text())
    assert found is not None, script
    return [code for code in found[1].split(", ") if code != "clean"]


@pytest.fixture(scope="module")
def starter(rank_pools: RankPools) -> Iterator[ForkingStarter]:
    with ForkingStarter(rank_pools.zygote) as starter:
        yield starter


def prove(script: Path, ranks: tuple[int, ...], starter: ForkingStarter, directory: Path, **more) -> list[Answer]:
    request = Request((str(script), *ARGUMENTS.get(script.name, ())), ranks=ranks, directory=directory, timeout_s=30.0, **more)
    inquiry = Inquiry(Runner(request, starter))
    inquiry.reference()
    return [inquiry.answer(number) for number in ranks[1:]]


@pytest.mark.parametrize("script", sorted(PLANTS.glob("*.py")), ids=lambda script: script.stem)
def test_prove_finds_what_is_wrong_and_nothing_else(script: Path, starter: ForkingStarter, tmp_path: Path) -> None:
    for answer in prove(script, (1, 2), starter, tmp_path / "prove"):
        codes = [finding.code for finding in answer.findings if finding.code not in HARMLESS]
        assert codes == expected(script), answer.findings
