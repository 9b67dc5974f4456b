import json
from collections import Counter
from pathlib import Path

import pytest

from hora.errors import CheckpointError, CheckpointMismatch, ConfigError
from hora.recipes.nmt.building import build_vocabularies, build_vocabulary, ranked, read_dictionary
from hora.recipes.nmt.config import DataConfig, VocabularyConfig
from hora.recipes.nmt.merges import Merges
from hora.recipes.nmt.symbols import BOS, EOS, PAD, UNK
from hora.recipes.nmt.vocabulary import PieceVocabulary, Vocabularies, WordVocabulary
from hora.recipes.vocabularies import FILE_NAME

EXCERPT = ("excerpt:train.en", "excerpt:train.de")
CODES = "#version: 0.2\nl o\nlo w</w>\nl ow</w>\ne r</w>\nn e\nne w\n"


def data_of(*vocabularies: VocabularyConfig) -> DataConfig:
    return DataConfig(EXCERPT, EXCERPT, vocabularies=vocabularies or (VocabularyConfig(),))


def test_words_get_numbers_after_the_symbols_and_come_back() -> None:
    vocabulary = WordVocabulary(("the", "cat"))
    assert vocabulary.encode(" the  dog cat ") == [4, UNK, 5]
    assert vocabulary.decode([BOS, 4, UNK, 5, EOS, 4, PAD]) == "the <UNK> cat"
    assert vocabulary.decode([]) == vocabulary.decode([EOS, 5]) == ""
    assert len(vocabulary) == 6


def test_frequent_words_come_first_and_symbols_are_no_words() -> None:
    assert ranked(Counter({"b": 2, "a": 2, "c": 3, "<EOS>": 9})) == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("low", ["low"]),
        ("lower", ["lo@@", "w@@", "er"]),
        ("new", ["new"]),
        ("newer", ["new@@", "er"]),
        ("x", ["x"]),
        ("lolo", ["lo@@", "l@@", "o"]),
    ],
)
def test_merges_cut_words_as_subword_nmt_does(word: str, parts: list[str]) -> None:
    merges = Merges.parse(CODES.replace("ne w\n", "ne w\nne w</w>\n"), "codes")
    assert merges.split(word) == parts
    assert Merges.join(" ".join(parts)) == word


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("#version: 0.1\na b\n", "codes:1: merges must be of version 0.2"),
        ("a b\na b c\n", "codes:2: a merge must be two"),
        ("\n", "is empty"),
    ],
)
def test_wrong_merges_are_refused_with_their_line(text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        Merges.parse(text, "codes")


def test_dictionaries_of_both_kinds_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"second": [1, 5], "<PAD>": [0, 0], "first": [0, 9]}))
    (tmp_path / "b.json").write_text(json.dumps({"second": 1, "first": 0}))
    (tmp_path / "c.txt").write_text("first 9\nsecond 5\n\nfirst 1\n")
    for name in ("a.json", "b.json", "c.txt"):
        assert read_dictionary(tmp_path / name) == ["first", "second"]


@pytest.mark.parametrize("text", ["[1]", '{"a": 1e999}', '{"a": []}', "[" * 100_000], ids=["list", "infinite", "none", "deep"])
def test_what_is_no_dictionary_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(ConfigError, match=r"d\.json must be JSON of word to number"):
        read_dictionary(tmp_path / "d.json")


def test_size_counts_the_symbols_and_parts_are_joined_again(tmp_path: Path) -> None:
    (tmp_path / "dict").write_text("lo@@\nlow\ner\nw@@\n")
    (tmp_path / "codes").write_text(CODES)
    config = VocabularyConfig("bpe", str(tmp_path / "dict"), 7, codes=str(tmp_path / "codes"))
    vocabulary = build_vocabulary(config, [], data_of())
    assert len(vocabulary) == 7
    assert vocabulary.encode("lower low") == [4, UNK, 6, 5]
    cut = build_vocabulary(VocabularyConfig("bpe", str(tmp_path / "dict")), [], data_of())
    assert cut.decode(cut.encode("lo@@ w@@ er low")) == "lower low"


def test_pieces_of_sentencepiece_get_our_numbers() -> None:
    both = build_vocabularies(data_of(VocabularyConfig("bpe", max_n_words=300)))
    vocabulary = both.source
    assert both.shared
    assert len(vocabulary) == 300
    numbers = vocabulary.encode("Tom is reading .")
    assert min(numbers) > UNK
    assert vocabulary.decode([BOS, *numbers, EOS, PAD]) == "Tom is reading ."
    assert vocabulary.encode_all(["Tom", "☃", ""]) == [vocabulary.encode("Tom"), vocabulary.encode("☃"), []]
    assert UNK in vocabulary.encode("☃")
    again = Vocabularies.from_json(both.to_json())
    assert again.digest == both.digest
    assert again.source.encode("Tom is reading .") == numbers


def test_model_with_symbols_of_its_own_is_renumbered() -> None:
    import io

    import sentencepiece

    model = io.BytesIO()
    lines = iter(["a b c d e f g", "ab cd ef"] * 10)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, vocab_size=20, model_type="bpe", bos_id=1, eos_id=2, unk_id=0, minloglevel=2
    )
    vocabulary = PieceVocabulary(model.getvalue())
    assert len(vocabulary) == 20 - 3 + 4
    numbers = vocabulary.encode("a b ab")
    assert min(numbers) >= 4
    assert max(numbers) < len(vocabulary)
    assert vocabulary.decode(numbers) == "a b ab"


def test_wrong_models_and_sizes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"none")
    with pytest.raises(ConfigError, match="model must be a sentencepiece model"):
        build_vocabularies(data_of(VocabularyConfig("bpe", sentencepiece=str(tmp_path / "model"))))
    with pytest.raises(ConfigError, match=r"cannot learn 90000 parts .*another max_n_words"):
        build_vocabularies(data_of(VocabularyConfig("bpe", max_n_words=90000)))


def test_vocabularies_are_kept_whole_and_compared(tmp_path: Path) -> None:
    merges = Merges((("a", "b"),))
    both = Vocabularies(WordVocabulary(("x",)), WordVocabulary(("y",), merges, in_parts=True))
    (tmp_path / FILE_NAME).write_text(both.to_json())
    found = Vocabularies.read(tmp_path)
    assert (found.source, found.target) == (both.source, both.target)
    assert not found.shared
    found.require_same(both, tmp_path)
    with pytest.raises(CheckpointMismatch, match="must be those of"):
        found.require_same(Vocabularies(both.source, both.source), tmp_path)
    for text in (both.to_json().replace('"x"', '"z"'), "{}", "no"):
        (tmp_path / FILE_NAME).write_text(text)
        with pytest.raises(CheckpointError):
            Vocabularies.read(tmp_path)
