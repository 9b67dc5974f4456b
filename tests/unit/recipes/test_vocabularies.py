from pathlib import Path

import pytest

from hora.errors import CheckpointError, CheckpointMismatch
from hora.recipes.lm.vocabulary import Vocabulary as Words
from hora.recipes.nmt.merges import Merges
from hora.recipes.nmt.vocabulary import PieceVocabulary, Vocabularies, WordVocabulary
from hora.recipes.vocabularies import FILE_NAME, require_same_vocabularies

AB = WordVocabulary(("a", "b"))


def run(path: Path, text: str | None) -> Path:
    """A run with a vocabulary; returns its checkpoint."""
    checkpoint = path / "checkpoints" / "step-00000001.g0"
    checkpoint.mkdir(parents=True)
    if text is not None:
        (path / FILE_NAME).write_text(text, encoding="utf-8")
    return checkpoint


def test_runs_with_the_same_vocabularies_and_those_without_are_taken(tmp_path: Path) -> None:
    text = Vocabularies(AB, AB).to_json()
    require_same_vocabularies([run(tmp_path / "a", text), run(tmp_path / "b", text), run(tmp_path / "c", None)])


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (Vocabularies(AB, AB), Vocabularies(AB, WordVocabulary(("a", "c"))), "target: 2 words and 2, of which word 2 is 'b' and 'c'."),
        (Vocabularies(AB, AB), Vocabularies(WordVocabulary(("a",)), AB), "source: 2 words and 1."),
        (Vocabularies(AB, AB), Vocabularies(WordVocabulary(("a", "b"), Merges((("a", "b"),))), AB), "source: other merges."),
        (Vocabularies(PieceVocabulary(b"1"), AB), Vocabularies(PieceVocabulary(b"2"), AB), "source: other model."),
        (Vocabularies(PieceVocabulary(b"1"), AB), Vocabularies(AB, AB), "source: other in_parts, kind, model, words."),
        (Words(("a", "b")), Words(("b", "a")), "words: 2 words and 2, of which word 1 is 'a' and 'b'."),
        (Words(("a", "b")), Vocabularies(AB, AB), "one is of a language model, one of a translation model."),
    ],
)
def test_what_differs_is_told(one: Vocabularies | Words, other: Vocabularies | Words, said: str, tmp_path: Path) -> None:
    checkpoints = [run(tmp_path / "a", one.to_json()), run(tmp_path / "b", other.to_json())]
    with pytest.raises(CheckpointMismatch) as caught:
        require_same_vocabularies(checkpoints)
    assert f"{tmp_path}/a/{FILE_NAME} and {tmp_path}/b/{FILE_NAME} differ: {said}" in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"vocabularies": []}', '{"vocabularies": [1]}'])
def test_a_file_that_cannot_be_read_is_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path}/a/{FILE_NAME} must hold the vocabularies of the run"):
        require_same_vocabularies([run(tmp_path / "a", text)])
