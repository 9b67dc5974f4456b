import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hora.strict_yaml import MAX_SIZE_BYTES, dump, parse, show


def _parse(text: str):
    return parse(text, lambda line, column: f"f:{line}:{column}")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("3.", 3.0),
        ("+7", 7),
        ("0", 0),
        ("-0", 0),
        ("0.5", 0.5),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("12:30", "12:30"),
        ("1_000", "1_000"),
        ("2026-01-02", "2026-01-02"),
        ("inf", "inf"),
        ("nan", "nan"),
        ("=", "="),
        ("<<", "<<"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("'010'", "010"),
    ],
)
def test_scalar_is_read_as_yaml_1_2(text, value):
    document = _parse(text)
    assert document.problems == []
    assert document.value == value
    assert type(document.value) is type(value)


def test_nan_is_read():
    assert math.isnan(_parse(".nan").value)


def test_places_count_lines_and_columns_from_one():
    document = _parse("a: 1\nb:\n  c: [x, y]\n")
    assert document.value == {"a": 1, "b": {"c": ["x", "y"]}}
    assert document.places == {
        (): "f:1:1",
        ("a",): "f:1:1",
        ("b",): "f:2:1",
        ("b", "c"): "f:3:3",
        ("b", "c", 0): "f:3:7",
        ("b", "c", 1): "f:3:10",
    }


def test_problems_are_all_reported():
    document = _parse("a: &x 1\na: 2\nb: *x\nc: !!python/name:os.system ''\nd: 010\n? [1]\n: 2\n")
    assert document.problems == [
        "f:1:4: anchors are not allowed, but here is &x; write the value out",
        "f:3:4: aliases are not allowed, but here is *x; write the value out",
        "f:4:4: tags are not allowed, but here is tag:yaml.org,2002:python/name:os.system; write the plain value",
        "f:2:1: duplicate key `a`; it stands at f:1:1 already",
        "f:5:4: a number must not begin with 0, but is 010 instead; write 10 or '010'",
        "f:6:3: a key must be a plain name, but is a list or a mapping instead",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [1", "f:1:6: this is no YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\n---\nb: 2", "f:2:1: this is no YAML: but found another document"),
        ("a: \x07", "f:1:1: this is no YAML: unacceptable character #x0007: special characters are not allowed"),
        ("[" * 40 + "]" * 40, "f:1:34: this is no YAML: values nest deeper than 32 levels"),
        ("#" * (MAX_SIZE_BYTES + 1), "f:1:1: a configuration must not exceed 1048576 bytes, but has 1048577 instead"),
        ('a: "\\ud800"', "f:1:4: a string must be valid Unicode, but holds half of a surrogate pair"),
    ],
)
def test_what_cannot_be_read_is_a_problem_with_its_place(text, problem):
    assert _parse(text).problems[0] == problem


def test_alias_bomb_is_refused_in_little_memory():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    document = _parse("\n".join(lines))
    assert len(document.problems) == 10 + 81
    assert document.value["a9"] == [None] * 9


_data = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4),
    max_leaves=10,
)


@given(_data)
def test_dump_is_read_back_to_the_same_data(value):
    document = _parse(dump(value))
    assert document.problems == []
    assert document.value == value


@pytest.mark.parametrize(
    "text", ["1e-4", "010", "no", "null", "~", "", " x", "a: b", "# c", "'", "0x1", "1_0", "*a", "&a", "!t", "-", "a\nb", "é", "\x85"]
)
def test_dump_keeps_strings_strings(text):
    assert _parse(dump({"key": text})).value == {"key": text}


def test_show_writes_a_path_as_users_do():
    assert show(("optimizer", "betas", 0)) == "optimizer.betas[0]"
