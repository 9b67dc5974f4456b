"""Configuration files that are wrong in every way we know: each is refused as a user's mistake, with its place, before anything starts."""

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field

from hora.errors import ConfigError
from hora.train.config import load_config


@dataclass(frozen=True)
class Optimizer:
    name: Literal["sgd", "adamw"] = "sgd"
    lr: Annotated[float, Field(gt=0)] = 1.0
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass(frozen=True)
class Config:
    seed: int = 1
    exact: bool = False
    data: Path = Path("data")
    optimizer: Optimizer = field(default_factory=Optimizer)
    layers: list[int] = field(default_factory=list)


VALID = b"seed: 3\nexact: false\ndata: some/where\noptimizer:\n  name: adamw\n  lr: 1e-4\n  betas: [0.9, 0.95]\nlayers:\n- 1\n- 2\n"

CORPUS = {
    "tab_indent": (b"optimizer:\n\tlr: 1\n", 2),
    "two_spaces_missing": (b"optimizer:\nlr: 1\n", 2),
    "wrong_indent": (b"optimizer:\n  lr: 1\n name: sgd\n", 3),
    "unclosed_list": (b"layers: [1, 2\nseed: 1\n", 2),
    "unclosed_mapping": (b"optimizer: {lr: 1\nseed: 1\n", 2),
    "unclosed_quote": (b"data: 'x\nseed: 1\n", 3),
    "no_space_after_colon": (b"seed:1\n", 1),
    "equals_sign": (b"seed = 1\n", 1),
    "json_trailing_garbage": (b'{"seed": 1} x\n', 1),
    "two_documents": (b"seed: 1\n---\nseed: 2\n", 2),
    "only_text": (b"seed\n", 1),
    "only_list": (b"- seed\n- 1\n", 1),
    "duplicate_key": (b"seed: 1\nexact: true\nseed: 1\n", 3),
    "duplicate_nested_key": (b"optimizer:\n  lr: 1\n  lr: 2\n", 3),
    "duplicate_quoted_key": (b"seed: 1\n'seed': 1\n", 2),
    "unknown_key": (b"seed: 1\nlearning_rate: 1\n", 2),
    "unknown_nested_key": (b"optimizer:\n  lrate: 1\n", 2),
    "key_in_other_case": (b"Seed: 1\n", 1),
    "list_as_key": (b"[1]: 2\n", 1),
    "merge_key": (b"optimizer:\n  <<: {lr: 1}\n", 2),
    "anchor": (b"seed: &a 1\n", 1),
    "alias": (b"layers: [1]\nseed: *a\n", 2),
    "tag_str": (b"seed: !!str 1\n", 1),
    "tag_python": (b"seed: !!python/object/apply:os.system ['exit 1']\n", 1),
    "tag_local": (b"seed: !env SEED\n", 1),
    "directive": (b"%YAML 9.9\n---\nseed: 1\n", 1),
    "string_for_integer": (b"seed: '1'\n", 1),
    "float_for_integer": (b"seed: 1e3\n", 1),
    "boolean_for_integer": (b"seed: true\n", 1),
    "null_for_integer": (b"seed: null\n", 1),
    "octal_looking": (b"seed: 010\n", 1),
    "underscore": (b"seed: 1_000\n", 1),
    "clock_time": (b"seed: 12:30\n", 1),
    "huge_integer": (b"seed: " + b"9" * 5000 + b"\n", 1),
    "yes_for_boolean": (b"exact: yes\n", 1),
    "integer_for_boolean": (b"exact: 1\n", 1),
    "number_for_path": (b"data: 3\n", 1),
    "mapping_for_path": (b"data: {a: 1}\n", 1),
    "boolean_for_float": (b"optimizer: {lr: false}\n", 1),
    "word_for_float": (b"optimizer: {lr: 1e}\n", 1),
    "bound_broken": (b"optimizer:\n  lr: 0\n", 2),
    "nan": (b"optimizer:\n  lr: .nan\n", 2),
    "choice_unknown": (b"optimizer:\n  name: adam\n", 2),
    "tuple_too_short": (b"optimizer:\n  betas: [0.9]\n", 2),
    "tuple_too_long": (b"optimizer:\n  betas: [0.9, 1, 1]\n", 2),
    "list_for_mapping": (b"optimizer: [1]\n", 1),
    "scalar_for_list": (b"layers: 3\n", 1),
    "wrong_item": (b"layers:\n- 1\n- x\n", 3),
    "binary": (bytes(range(256)), None),
    "latin_1": ("data: é\n".encode("latin-1"), None),
    "utf_16": ("seed: 1\n".encode("utf-16"), None),
    "nul": (b"seed: 1\x00\n", 1),
    "half_surrogate": (b'data: "\\ud800"\n', 1),
    "deep": (b"seed: " + b"[" * 10_000, 1),
    "too_long": (b"# " + b"x" * (2 << 20), 1),
}


@pytest.mark.parametrize("name", CORPUS)
def test_malformed_file_is_refused_with_its_line(tmp_path, name):
    content, line = CORPUS[name]
    path = tmp_path / f"{name}.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(Config, path)
    place = f"{path}:" if line is None else f"{path}:{line}:"
    assert place in str(caught.value)


def test_the_corpus_is_built_around_a_valid_file(tmp_path):
    path = tmp_path / "valid.yaml"
    path.write_bytes(VALID)
    assert load_config(Config, path) == Config(3, False, Path("some/where"), Optimizer("adamw", 1e-4, (0.9, 0.95)), [1, 2])


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "fifo"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path, make):
    path = tmp_path / "odd"
    make(path)
    with pytest.raises(ConfigError, match=r"odd: the configuration file cannot be read: it is no regular file"):
        load_config(Config, path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.integers(0, len(VALID)),
    length=st.integers(0, 20),
    noise=st.binary(max_size=8) | st.sampled_from([b"- ", b"{", b"}", b"&a ", b"*a", b": ", b"\n", b"? "]),
)
def test_damaged_file_is_read_or_refused_and_nothing_else(tmp_path, start, length, noise):
    path = tmp_path / "damaged.yaml"
    path.write_bytes(VALID[:start] + noise + VALID[start + length :])
    with contextlib.suppress(ConfigError):
        assert isinstance(load_config(Config, path), Config)
