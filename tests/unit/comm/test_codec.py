import json
import math
from collections import Counter, OrderedDict
from enum import IntEnum

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hora.comm.codec import decode, encode
from hora.errors import ConfigError


def round_trip(tree):
    skeleton, tensors = encode(tree)
    return decode(json.loads(json.dumps(skeleton, allow_nan=False)), tensors)


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
trees = st.recursive(
    leaves,
    lambda branches: st.lists(branches) | st.lists(branches).map(tuple) | st.dictionaries(st.text() | st.integers(), branches),
    max_leaves=20,
)


def same(first, second) -> bool:
    """Equal, with types: True is not 1, and 0.0 is not -0.0."""
    return repr(first) == repr(second)


@given(trees)
def test_every_tree_of_plain_values_comes_back(tree):
    assert same(round_trip(tree), tree)


def test_nan_comes_back():
    assert math.isnan(round_trip({"x": math.nan})["x"])


@pytest.mark.parametrize("tree", [{"$tensor": 1}, {"$": 2}, {"$tuple": [1]}, {1: "a", "1": "b"}, {"a": {"$float": "x"}}])
def test_keys_that_look_like_marks_come_back(tree):
    assert same(round_trip(tree), tree)


def test_tensors_are_named_after_their_place_and_not_copied():
    moment = torch.ones(2, requires_grad=True)
    skeleton, tensors = encode({"state": {0: {"exp_avg": moment}}, "list": [torch.zeros(1)]})
    assert list(tensors) == ["state.0.exp_avg", "list.0"]
    assert tensors["state.0.exp_avg"].data_ptr() == moment.data_ptr()
    assert not tensors["state.0.exp_avg"].requires_grad
    assert decode(skeleton, tensors)["list"][0] is tensors["list.0"]


def test_places_that_read_the_same_get_different_names():
    tree = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    skeleton, tensors = encode(tree)
    assert list(tensors) == ["a.b", "a.b~2"]
    assert decode(skeleton, tensors)["a"]["b"].item() == 2


def test_tensor_alone_has_a_name():
    assert list(encode(torch.zeros(1))[1]) == ["tensor"]


def test_optimizer_state_comes_back():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    restored = round_trip(state)
    assert restored["param_groups"] == state["param_groups"]
    assert all(torch.equal(restored["state"][1][name], value) for name, value in state["state"][1].items())


def test_kinds_of_dict_and_size_become_the_plain_kind():
    assert same(round_trip(OrderedDict(a=1)), {"a": 1})
    assert same(round_trip(Counter({3: 2})), {3: 2})
    assert same(round_trip(torch.Size([2, 3])), (2, 3))


class Colour(IntEnum):
    RED = 1


CYCLE: list[object] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [1, {2, 3}]}, r"a\.1 must be None, bool, .* but is builtins.set instead"),
        (object(), "the value must be"),
        ({"a": {True: 1}}, r"the keys of a must be str or int, but True is builtins.bool"),
        ({"a": {(1,): 1}}, r"the keys of a must be"),
        ([Colour.RED], r"0 must be .* is .*Colour instead"),
        ({"w": torch.zeros(2, 2).to_sparse()}, "w must be a dense tensor"),
        ({"w": torch.zeros(2, device="meta")}, "w must be a dense tensor"),
        (CYCLE, "at most 100 levels deep"),
        ([1 + 2j], "builtins.complex"),
    ],
)
def test_what_cannot_be_said_is_refused_with_its_place(tree, message):
    with pytest.raises(ConfigError, match=message):
        encode(tree)


@pytest.mark.parametrize(
    "skeleton",
    [
        {"$tensor": "absent"},
        {"$nonsense": 1},
        {"$float": "1e5"},
        {"$float": 3},
        {"$bytes": "!!"},
        {"$bytes": 3},
        {"$tuple": 3},
        {"$dict": [[None, 1]]},
        {"$dict": [[1]]},
        {"$tuple": [], "x": 1},
        {"$tensor": []},
    ],
)
def test_skeletons_that_encode_never_makes_are_refused(skeleton):
    with pytest.raises(ConfigError, match="must be one that hora"):
        decode(skeleton, {})
