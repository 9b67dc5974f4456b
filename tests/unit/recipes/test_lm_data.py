from pathlib import Path

import pytest
import torch

import hora
from hora.errors import ConfigError
from hora.recipes.lm.config import DataConfig
from hora.recipes.lm.data import load_corpus, read_corpus
from hora.recipes.lm.text import EXCERPT, TextFiles, locate
from hora.testing import run_ranks


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "train.txt").write_text("a b a\nc a\n" * 20)
    (tmp_path / "valid.txt").write_text("a z\n" * 10)
    (tmp_path / "test.txt").write_text("b\n" * 10)
    return tmp_path


def test_words_become_their_numbers(texts: Path) -> None:
    corpus = read_corpus(DataConfig(path=str(texts), rows=2, window=3))
    assert corpus.vocabulary.words == ("a", "<eos>", "b", "c", "<unk>")
    assert corpus.tokens["train"][:7].tolist() == [0, 2, 0, 1, 3, 0, 1]
    assert corpus.tokens["valid"][:3].tolist() == [0, 4, 1]
    assert corpus.tokens["train"].dtype == torch.int32
    assert corpus.lengths() == {"train": 140, "valid": 30, "test": 20}


def test_words_outside_the_vocabulary_are_counted_and_said(texts: Path, caplog: pytest.LogCaptureFixture, propagating_log: None) -> None:
    with caplog.at_level("INFO", logger="hora"):
        read_corpus(DataConfig(path=str(texts), rows=2, window=3))
    assert "valid.txt: 10 words (33.33 %) are not in the vocabulary and become <unk>" in caplog.text


def test_undecodable_lines_are_counted_once(texts: Path, caplog: pytest.LogCaptureFixture, propagating_log: None) -> None:
    with (texts / "train.txt").open("ab") as file:
        file.write(b"\xff\n")
    with caplog.at_level("WARNING", logger="hora"):
        read_corpus(DataConfig(path=str(texts), rows=2, window=3, undecodable="skip"))
    assert "1 lines are not UTF-8" in caplog.text


def test_texts_too_short_are_refused_with_the_numbers(texts: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.txt must have at least 147 tokens, but has 140; .*test\.txt must have at least 22"):
        read_corpus(DataConfig(path=str(texts), rows=21, window=6))
    assert read_corpus(DataConfig(path=str(texts), rows=10, window=13)).lengths()["train"] == 140


def test_digests_tell_what_has_changed(texts: Path) -> None:
    data = DataConfig(path=str(texts), rows=2, window=3)
    before = read_corpus(data).digests()
    (texts / "test.txt").write_text("c\n" * 10)
    after = read_corpus(data).digests()
    assert [name for name in before if before[name] != after[name]] == ["test"]


@run_ranks(1, 2, 3)
def test_only_rank_zero_needs_the_files(texts: Path) -> None:
    path = texts if hora.rank() == 0 else texts / "elsewhere"
    corpus = load_corpus(DataConfig(path=str(path), rows=3, window=3))
    assert corpus.digests() == read_corpus(DataConfig(path=str(texts), rows=3, window=3)).digests()
    assert all(tokens.device == hora.device() for tokens in corpus.tokens.values())


@run_ranks(2)
def test_mistake_found_by_rank_zero_is_raised_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must hold a training"):
        load_corpus(DataConfig(path=str(tmp_path)))


def test_data_must_be_given() -> None:
    with pytest.raises(ConfigError, match="but is empty; give it with --data"):
        locate("")


def test_excerpt_goes_by_its_name() -> None:
    assert locate("excerpt") == TextFiles.find(EXCERPT)
