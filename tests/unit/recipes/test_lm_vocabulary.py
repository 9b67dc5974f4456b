from collections import Counter

import pytest

from hora.errors import CheckpointError
from hora.recipes.lm.vocabulary import Vocabulary


def test_words_are_ranked_by_frequency_and_then_by_spelling() -> None:
    vocabulary = Vocabulary.build(Counter(["b", "b", "a", "a", "c", "<unk>", "<unk>", "<unk>"]))
    assert vocabulary.words == ("<unk>", "a", "b", "c")
    assert [vocabulary.index[word] for word in ("c", "<unk>")] == [3, 0]


def test_unknown_is_added_last_to_a_text_without_it() -> None:
    assert Vocabulary.build(Counter(["a", "a", "z", "z", "b"])).words == ("a", "z", "b", "<unk>")


def test_words_beyond_the_largest_size_count_as_unknown() -> None:
    vocabulary = Vocabulary.build(Counter({"a": 5, "b": 4, "c": 3, "d": 2}), max_size=3)
    assert vocabulary.words == ("<unk>", "a", "b")


def test_a_largest_size_that_every_word_fits_leaves_none_out() -> None:
    counts = Counter({"a": 5, "<unk>": 1})
    assert Vocabulary.build(counts, max_size=2) == Vocabulary.build(counts) == Vocabulary(("a", "<unk>"))


def test_vocabulary_survives_its_file() -> None:
    vocabulary = Vocabulary(("ünï", '"', "<unk>"))
    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary


@pytest.mark.parametrize(("old", "new"), [('"b"', '"x"'), ('"format": 1', '"format": 2'), ('"words"', '"wörter"'), ("[", "")])
def test_changed_vocabulary_file_is_refused(old: str, new: str) -> None:
    text = Vocabulary(("a", "b")).to_json()
    assert old in text
    with pytest.raises(CheckpointError, match="vocabulary file"):
        Vocabulary.from_json(text.replace(old, new))


def test_digest_depends_on_the_order() -> None:
    assert Vocabulary(("a", "b")).digest != Vocabulary(("b", "a")).digest
