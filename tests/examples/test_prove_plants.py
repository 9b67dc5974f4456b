"""`hora prove` on scripts with one fault each, and on scripts that are right: what it says is what their first line expects."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prove_kit import ForkingStarter, Nest

from hora.diag.prove.answers import SAME_BITS, Answer
from hora.diag.prove.inquiry import Inquiry
from hora.diag.prove.request import Request
from hora.diag.prove.run import Runner

PLANTS = Path(__file__).parent / "prove"
ARGUMENTS = json.loads((PLANTS / "args.json").read_text())
HARMLESS = {"order-of-summation"}


def expected(script: Path) -> list[str]:
    found = re.match(r"# expect: (.+)", script.read_text())
    assert found is not None, script
    return [code for code in found[1].split(", ") if code not in ("clean", "rounding")]


@pytest.fixture
def starter(prove_nest: Nest) -> ForkingStarter:
    return ForkingStarter(prove_nest)


def prove(words: Sequence[str], ranks: tuple[int, ...], starter: ForkingStarter, directory: Path, **more: Any) -> list[Answer]:
    request = Request(tuple(words), ranks=ranks, directory=directory, timeout_s=30.0, **more)
    inquiry = Inquiry(Runner(request, starter))
    inquiry.reference()
    return [inquiry.answer(number) for number in ranks[1:]]


@pytest.mark.parametrize("script", sorted(PLANTS.glob("*.py")), ids=lambda script: script.stem)
def test_prove_finds_what_is_wrong_and_nothing_else(script: Path, starter: ForkingStarter, tmp_path: Path) -> None:
    for answer in prove([str(script), *ARGUMENTS[script.name]], (1, 2), starter, tmp_path / "prove"):
        codes = [finding.code for finding in answer.findings if finding.code not in HARMLESS]
        assert codes == expected(script), answer.findings


LM = [
    "hora", "train", "lm", "--config", "demo", "--set", "model.hidden_size=16", "--set", "data.max_vocabulary=300", "--set", "data.window=16",
    "--set", "tensorboard=false", "--run-dir",
]  # fmt: skip


def test_exact_recipe_has_the_same_bits_on_any_number_of_ranks(starter: ForkingStarter, tmp_path: Path) -> None:
    words = [*LM, str(tmp_path / "run-{ranks}"), "--exact"]
    for answer in prove(words, (1, 2, 3), starter, tmp_path / "prove", exact=True, module=True, steps=4):
        assert [cell.verdict for cell in answer.cells] == [SAME_BITS] * 4
        assert not answer.findings


def test_example_has_the_fault_that_its_page_tells(starter: ForkingStarter, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "ddp_images.py"
    (answer,) = prove([str(script), "--batch-size", "{32/ranks}"], (1, 2), starter, tmp_path / "prove", steps=3)
    assert [finding.code for finding in answer.findings] == ["batch-statistics-per-rank"]
    assert answer.first is not None
    assert (answer.first[0], answer.first[1].stage) == (1, "gradients")


@pytest.mark.parametrize(("name", "code"), [("fault_gradients_off_by_factor_summed.py", "gradients-off-by-factor"), ("clean_hora.py", "")])
def test_first_number_of_ranks_may_be_the_largest(name: str, code: str, starter: ForkingStarter, tmp_path: Path) -> None:
    for answer in prove([str(PLANTS / name), *ARGUMENTS[name]], (4, 1, 2), starter, tmp_path / "prove"):
        assert [finding.code for finding in answer.causes] == [code] * bool(code)
