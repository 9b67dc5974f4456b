import os
from dataclasses import replace
from pathlib import Path

import pytest

import hora
from hora.errors import ConfigError
from hora.recipes.nmt.config import DataConfig, VocabularyConfig
from hora.recipes.nmt.corpus import load_corpus
from hora.recipes.nmt.symbols import UNK
from hora.testing import run_ranks


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "train.en").write_text("a b\n\nc a b\na a a a a\nb\n")
    (tmp_path / "train.de").write_text("A\nB\nC A\nA\nB B\n")
    (tmp_path / "valid.en").write_text("a z\n\na a a a a a\n")
    (tmp_path / "valid.de").write_text("A\nB\nZ\n")
    return tmp_path


def data_of(texts: Path, **more: object) -> DataConfig:
    names = {f"{split}_data": (str(texts / f"{split}.en"), str(texts / f"{split}.de")) for split in ("train", "valid")}
    return DataConfig(**names, cache=str(texts / "cache"), max_len=(4, 4), **more)  # type: ignore[arg-type]


@run_ranks(1)
def test_pairs_are_numbered_kept_and_left_out_together(texts: Path) -> None:
    corpus = load_corpus(data_of(texts))
    train, valid = corpus.texts["train"], corpus.texts["valid"]
    english = corpus.vocabularies.source.decode
    assert [english(train.source[index]) for index in range(len(train))] == ["a b", "c a b", "b"]
    assert [train.target[index].tolist() for index in range(len(train))] == [[4], [6, 4], [5, 5]]
    assert [valid.source[index].tolist() for index in range(len(valid))] == [[4, UNK], [], [4] * 6]
    assert valid.source.lengths.tolist() == [2, 0, 6]


@run_ranks(1)
def test_policies_decide_what_becomes_of_lines(texts: Path) -> None:
    for key, fault in (
        ("empty", r"train\.en:2: a sentence must not be empty.*set data_configs\.empty"),
        ("overlong", r"train\.en:4: .*at most 4 words or parts, but has 5"),
    ):
        with pytest.raises(ConfigError, match=fault):
            load_corpus(data_of(texts, **{key: "error"}))
    mended = load_corpus(data_of(texts, empty="replace", overlong="replace")).texts["train"]
    assert mended.source.lengths.tolist() == [2, 0, 3, 4, 1]
    (texts / "train.en").write_text("\n" * 5)
    with pytest.raises(ConfigError, match=r"at least one pair, but none of .*train\.en.* is left"):
        load_corpus(data_of(texts))


@run_ranks(1)
def test_numbered_texts_are_found_again_unless_something_else_was_wanted(texts: Path) -> None:
    digest = load_corpus(data_of(texts)).digest
    cache = texts / "cache"
    (file,) = cache.iterdir()
    before = file.stat()
    assert load_corpus(data_of(texts)).digest == digest
    assert file.stat() == before
    vocabularies = (VocabularyConfig(max_n_words=6),)
    others = [data_of(texts, overlong="replace"), replace(data_of(texts), max_len=(5, 5)), data_of(texts, vocabularies=vocabularies)]
    assert len({load_corpus(data).digest for data in others} | {digest}) == 4
    (texts / "valid.de").write_text("A\nB\nA\n")
    assert load_corpus(data_of(texts)).digest != digest
    assert len(list(cache.iterdir())) == 5


@run_ranks(3)
def test_ranks_map_one_file_and_only_rank_zero_needs_the_texts(texts: Path) -> None:
    data = data_of(texts)
    if hora.rank() > 0:  # which then cannot know what the texts are called
        data = replace(data, train_data=("gone", "gone"))
    corpus = load_corpus(data)
    assert len(corpus.texts["train"]) == 3
    (file,) = (texts / "cache").iterdir()
    assert str(file) in Path("/proc/self/maps").read_text()


@run_ranks(2, nodes=None)
def test_mistake_on_rank_zero_is_raised_on_every_rank(texts: Path) -> None:
    with pytest.raises(ConfigError, match="gone is not there"):
        load_corpus(replace(data_of(texts), train_data=("gone", str(texts / "train.de"))))


@run_ranks(2, nodes=(0, 1))
def test_host_that_lacks_the_file_gets_it(texts: Path) -> None:
    data = replace(data_of(texts), cache=str(texts / f"host{hora.rank()}"))
    digest = load_corpus(data).digest
    hora.barrier()
    one, other = (texts / f"host{rank}" / f"nmt-{digest[:40]}.safetensors" for rank in (0, 1))
    assert one.read_bytes() == other.read_bytes()
    assert not os.path.samefile(one, other)
