import gzip
from pathlib import Path

import pytest

from hora.errors import ConfigError
from hora.recipes.nmt.texts import EXCERPT, Findings, LineCheck, locate, read_lines, read_pairs, require_texts


def check(policy: str = "error") -> LineCheck:
    return LineCheck("undecodable", policy, Findings())  # type: ignore[arg-type]


def test_lines_end_at_newlines_alone_also_in_gzip_files(tmp_path: Path) -> None:
    content = "a\u2028b\x0bc\x85d\re\n\nlast".encode()
    (tmp_path / "plain").write_bytes(content)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(content))
    expected = ["a\u2028b\x0bc\x85d\re".encode(), b"", b"last"]
    assert list(read_lines(tmp_path / "plain")) == list(read_lines(tmp_path / "packed.gz")) == expected


def test_mark_of_utf8_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "en").write_bytes(b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n")
    (tmp_path / "en.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfa"))
    assert list(read_lines(tmp_path / "en")) == [b"a", b"\xef\xbb\xbfb"]
    assert list(read_lines(tmp_path / "en.gz")) == [b"a"]


def test_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    packed = gzip.compress(b"some words\n" * 1000)
    for number, damaged in enumerate((packed[:-20], packed[:20] + b"\xff" * 30 + packed[50:], b"no gzip")):
        path = tmp_path / f"{number}.gz"
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=rf"{number}\.gz cannot be read"):
            list(read_lines(path))


def test_sides_of_unequal_length_are_counted(tmp_path: Path) -> None:
    (tmp_path / "en").write_text("a\nb\nc\nd\n")
    (tmp_path / "de").write_text("a\nb\n")
    for names in (("en", "de"), ("de", "en")):
        with pytest.raises(ConfigError, match=r"as many lines, but have \d \(.*\) and \d \(.*\)") as caught:
            list(read_pairs([tmp_path / name for name in names], check()))
        assert "4 (" in str(caught.value)
        assert "2 (" in str(caught.value)


def test_line_that_is_not_utf8_is_dealt_with_by_the_policy(tmp_path: Path) -> None:
    (tmp_path / "en").write_bytes(b"a\ncaf\xe9\nb\nna\xefve\n")
    (tmp_path / "de").write_text("1\n2\n3\n4\n")
    paths = [tmp_path / "en", tmp_path / "de"]
    with pytest.raises(ConfigError, match=r"en:2: a text must be UTF-8, but byte 4 of the line is 0xe9; .*data_configs\.undecodable"):
        list(read_pairs(paths, check()))
    skipping, replacing = check("skip"), check("replace")
    assert list(read_pairs(paths, skipping)) == [("a", "1"), (None, "2"), ("b", "3"), (None, "4")]
    assert [pair[0] for pair in read_pairs(paths, replacing)] == ["a", "caf\ufffd", "b", "na\ufffdve"]
    assert list(skipping.findings.counts.values()) == list(replacing.findings.counts.values()) == [2]
    assert list(skipping.findings.places.values()) == [f"{tmp_path / 'en'}:2"]


def test_missing_and_empty_texts_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=r"gone is not there; .*away is not there; .*empty is empty"):
        require_texts([str(tmp_path / "gone"), str(tmp_path / "empty"), str(tmp_path / "away"), "excerpt:train.en"])


def test_excerpt_is_small_licensed_and_split() -> None:
    assert sum(path.stat().st_size for path in EXCERPT.iterdir()) < 300_000
    assert "Creative Commons Attribution 2.0 France" in (EXCERPT / "ATTRIBUTION.md").read_text()
    for language in ("en", "de"):
        train, valid = (set(read_lines(EXCERPT / f"{split}.{language}")) for split in ("train", "valid"))
        assert not train & valid


def test_excerpt_has_pairs() -> None:
    assert locate("excerpt:train.en") == EXCERPT / "train.en"
    for split in ("train", "valid"):
        pairs = list(read_pairs([EXCERPT / f"{split}.en", EXCERPT / f"{split}.de"], check()))
        assert len(pairs) == {"train": 4000, "valid": 200}[split]
        assert all(source and target for source, target in pairs)
