from collections import Counter
from pathlib import Path

import pytest

from hora.errors import ConfigError
from hora.recipes.lm.text import EXCERPT, TextFiles, Undecodable, WordReader


def write(directory: Path, **texts: bytes) -> Path:
    for name, text in texts.items():
        (directory / f"{name}.txt").write_bytes(text)
    return directory


@pytest.mark.parametrize("pattern", ["{}.txt", "ptb.{}.txt", "wiki.{}.tokens"])
def test_texts_are_found_under_each_usual_name(tmp_path: Path, pattern: str) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / pattern.format(split)).write_text(split)
    files = TextFiles.find(tmp_path)
    assert [path.read_text() for path in (files.train, files.valid, files.test)] == ["train", "valid", "test"]


def test_every_missing_and_empty_text_is_named(tmp_path: Path) -> None:
    write(tmp_path, train=b"a", valid=b"")
    with pytest.raises(ConfigError, match=r"lacks test\.txt or ptb\.test\.txt or wiki\.test\.tokens; valid\.txt is empty"):
        TextFiles.find(tmp_path)


def test_absent_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere must exist"):
        TextFiles.find(tmp_path / "nowhere")


def test_each_line_ends_with_its_word_even_without_a_newline(tmp_path: Path) -> None:
    write(tmp_path, train=b" a  b \r\n\nc")
    assert list(WordReader().words(tmp_path / "train.txt")) == ["a", "b", "<eos>", "<eos>", "c", "<eos>"]


def test_mark_of_utf8_is_no_part_of_the_first_word(tmp_path: Path) -> None:
    write(tmp_path, train=b"\xef\xbb\xbfa b\n")
    assert list(WordReader().words(tmp_path / "train.txt")) == ["a", "b", "<eos>"]


def test_other_line_separators_part_words_but_end_no_line(tmp_path: Path) -> None:
    write(tmp_path, train="a\u2028b\x85c\x0bd\n".encode())
    assert WordReader().count(tmp_path / "train.txt") == Counter(["a", "b", "c", "d", "<eos>"])


def test_undecodable_line_is_an_error_with_its_place(tmp_path: Path) -> None:
    write(tmp_path, train=b"good\nba\xffd\n")
    with pytest.raises(ConfigError, match=r"train\.txt:2: .*byte 3 of the line is 0xff"):
        WordReader().count(tmp_path / "train.txt")


@pytest.mark.parametrize(("policy", "words"), [("skip", ["a", "<eos>"]), ("replace", ["a", "<eos>", "b\ufffd", "<eos>"])])
def test_undecodable_line_is_treated_as_asked_and_counted(tmp_path: Path, policy: Undecodable, words: list[str]) -> None:
    write(tmp_path, train=b"a\nb\xff\n")
    reader = WordReader(policy)
    assert list(reader.words(tmp_path / "train.txt")) == words
    assert reader.undecodable_lines == 1


def test_unreadable_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.txt cannot be read"):
        WordReader().count(tmp_path / "absent.txt")


def test_excerpt_is_small_whole_and_licensed() -> None:
    files = TextFiles.find(EXCERPT)
    assert sum(path.stat().st_size for path in EXCERPT.iterdir()) < 1_500_000
    attribution = (EXCERPT / "ATTRIBUTION.md").read_text(encoding="utf-8")
    for path in (files.train, files.valid, files.test):
        title = path.read_text(encoding="utf-8").split("\n")[1].strip(" =")
        assert f"## Articles in `{path.name}`" in attribution
        assert f"- {title}\n" in attribution
    assert "Attribution-ShareAlike 3.0 Unported" in (EXCERPT / "LICENSE.txt").read_text()
