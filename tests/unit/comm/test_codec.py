import dataclasses
import json
import math
import sys
from collections import Counter, OrderedDict
from enum import Enum, IntEnum
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hora.comm.codec import decode, encode
from hora.errors import ConfigError


def round_trip(tree):
    skeleton, tensors = encode(tree)
    return decode(json.loads(json.dumps(skeleton, allow_nan=False)), tensors)


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False) | st.text() | st.binary()
)
keys = st.recursive(leaves, lambda parts: st.lists(parts).map(tuple), max_leaves=4)
trees = st.recursive(
    leaves | st.frozensets(keys, max_size=1),
    lambda branches: st.lists(branches) | st.lists(branches).map(tuple) | st.dictionaries(keys, branches),
    max_leaves=20,
)


def same(first, second) -> bool:
    """Equal, with types: True is not 1, and 0.0 is not -0.0."""
    return repr(first) == repr(second)


@settings(max_examples=40)
@given(trees)
def test_every_tree_of_plain_values_comes_back(tree):
    assert same(round_trip(tree), tree)


def test_nan_comes_back():
    assert math.isnan(round_trip({"x": math.nan})["x"])


@settings(max_examples=40)
@given(st.sets(keys))
def test_every_set_of_keys_comes_back(tree):
    assert round_trip(tree) == tree
    assert round_trip(frozenset(tree)) == frozenset(tree)


def test_sets_are_written_in_one_order_whatever_their_hashes():
    assert encode({"c", "a", "b"})[0] == {"$set": ["a", "b", "c"]}
    assert encode({frozenset({"d", "c", "b", "a"})})[0] == {"$set": [{"$frozenset": ["a", "b", "c", "d"]}]}


UNUSUAL = [10**5000, -(10**5000), "\ud800" * 70_000, "é" * 70_000, b"\x00\xff" * 70_000, complex(-0.0, math.inf), {10**5000: 1}]


@pytest.mark.parametrize("tree", UNUSUAL, ids=range(len(UNUSUAL)))
def test_what_json_cannot_say_well_comes_back(tree):
    assert type(round_trip(tree)) is type(tree)
    assert round_trip(tree) == tree


def test_long_text_and_bytes_are_tensors_and_not_copied():
    long = b"x" * 100_000
    skeleton, tensors = encode({"a": long, "b": "y" * 100_000})
    assert skeleton == {"a": {"$long_bytes": "a"}, "b": {"$long_str": "b"}}
    assert tensors["a"].numel() == 100_000


ARRAYS = [
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.arange(6.0).reshape(2, 3).T,
    np.arange(6, dtype=">f4")[::2],
    np.array(1 + 2j),
    np.array(True),
    np.array(["a", "bcd"]),
    np.array([b"a", b"bcd"]),
    np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
    np.array([3], dtype="m8[25us]"),
    np.empty((0, 3), np.float32),
    np.empty((2, 0), "U0"),
    np.frombuffer(b"read-only", np.uint8),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: array.dtype.str)
def test_arrays_come_back_with_their_dtype_and_can_be_written(array):
    found = round_trip([array])[0]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    assert found.flags.aligned


@pytest.mark.parametrize(
    "scalar",
    [
        np.float32(1.1),
        np.int8(-3),
        np.bool_(True),
        np.complex64(1j),
        np.str_("é"),
        np.str_(""),
        np.bytes_(b"\x01"),
        np.datetime64("2020", "Y"),
    ],
    ids=lambda scalar: type(scalar).__name__,
)
def test_numpy_scalars_stay_what_they_are(scalar):
    found = round_trip({scalar: scalar})
    assert same(found, {scalar: scalar})
    assert type(found[scalar]) is type(scalar)


@dataclasses.dataclass
class Point:
    x: float
    y: float = 0.0

    def __post_init__(self) -> None:
        Point.made += 1


Point.made = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    @dataclasses.dataclass
    class Inner:
        points: list[Point]

    inner: Inner
    size: int = dataclasses.field(init=False, default=3)


def test_dataclasses_come_back_without_their_code_being_run():
    tree = {"a": Frozen(Frozen.Inner([Point(1.0, math.inf)]))}
    before = Point.made
    found = round_trip(tree)
    assert found == tree
    assert type(found["a"]) is Frozen
    assert Point.made == before


def test_tensors_in_a_dataclass_are_named_after_its_fields():
    assert list(encode({"a": Point(torch.ones(1), np.ones(1))})[1]) == ["a.x", "a.y"]


def test_class_that_is_not_loaded_is_refused_and_not_imported():
    assert "this" not in sys.modules
    for name in (
        "this:Point",
        "hora.nothing:Point",
        f"{__name__}:Pint",
        f"{__name__}:Colour",
        f"{__name__}:Point.x",
        f"{__name__}:np",
        "",
        ":",
    ):
        with pytest.raises(ConfigError, match="must be loaded in this process"):
            decode({"$dataclass": [name, {"x": 1, "y": 2}]}, {})
    assert "this" not in sys.modules


def test_modules_are_not_asked_for_names_that_they_make_up(monkeypatch):
    module = ModuleType("made_up")
    module.__getattr__ = lambda name: pytest.fail(f"asked for {name}")
    monkeypatch.setitem(sys.modules, "made_up", module)
    with pytest.raises(ConfigError, match="must be loaded"):
        decode({"$dataclass": ["made_up:Point", {}]}, {})


@pytest.mark.parametrize("fields", [{"x": 1}, {"x": 1, "y": 2, "z": 3}, {}])
def test_class_with_other_fields_is_refused(fields):
    with pytest.raises(ConfigError, match=r"Point' must have the fields .*, but here has x, y"):
        decode({"$dataclass": [f"{__name__}:Point", fields]}, {})


@dataclasses.dataclass
class Computed:
    x: int

    @property
    def y(self):
        return self.x

    @y.setter
    def y(self, value):
        pytest.fail("code was run")


Computed.__dataclass_fields__ = Point.__dataclass_fields__


@dataclasses.dataclass
class Based(list):
    x: int = 1


def local():
    @dataclasses.dataclass
    class Local:
        x: int = 1

    return Local()


def unset():
    point = Point(1.0)
    del point.x
    return point


def test_old_files_can_be_read():
    """What the first version wrote."""
    old = {"a": {"$tuple": [1, {"$float": "-inf"}]}, "b": {"$dict": [[0, {"$tensor": "b.0"}], ["$", {"$bytes": "AP8="}]]}}
    weights = torch.ones(2)
    assert same(decode(old, {"b.0": weights}), {"a": (1, -math.inf), "b": {0: weights, "$": b"\x00\xff"}})


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


class Shape(Enum):
    ROUND = 1


class Number(float):
    pass


CYCLE: list[object] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"state": {"optimizer": [{"lr": object}]}}, r"^state\.optimizer\.0\.lr must be None, bool, .* but is builtins.type instead"),
        (object(), "the value must be"),
        ({"a": {Colour.RED: 1}}, r"the keys of a must be None, bool, .*, but <Colour.RED: 1> is .*Colour"),
        ({"a": {(1, range(2)): 1}}, r"the keys of a must be .* but range\(0, 2\) is builtins.range"),
        ({"a": {Frozen(1)}}, r"the elements of a must be .*Frozen"),
        ([Colour.RED], r"0 must be .* is .*Colour instead; send its value or its name"),
        ([Shape.ROUND], r"0 must be .* is .*Shape instead; send its value or its name"),
        ([Number(1)], r"0 must be .* is .*Number instead"),
        ({"a": np.array([object()])}, "a must be a NumPy array of numbers, .* but its dtype is object"),
        ({"a": np.zeros(2, "i4,f4")}, "a must be a NumPy array of numbers"),
        ({"a": np.ma.masked_array([1])}, "a must be .*MaskedArray instead"),
        ({"a": [local()]}, r"a\.0 is .*Local, and must be a dataclass that stands at the top of a module"),
        ({"a": Based()}, r"a is .*Based, and must be a dataclass that is made of its fields alone"),
        ({"a": Computed(1)}, r"a is .*Computed, and must be a dataclass whose fields are plain values, but setting y runs code"),
        ({"a": unset()}, r"a is .*Point, and must have a value in each field, but has none in x"),
        ({"a": Point}, "a must be .* builtins.type instead"),
        ({"a": Point(1.0, lambda: 1)}, r"a\.y must be .* builtins.function instead"),
        ({"w": torch.zeros(2, 2).to_sparse()}, "w must be a dense tensor"),
        ({"w": torch.zeros(2, device="meta")}, "w must be a dense tensor"),
        (CYCLE, "at most 100 levels deep"),
    ],
)
def test_what_cannot_be_said_is_refused_with_its_place(tree, message):
    with pytest.raises(ConfigError, match=message):
        encode(tree)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_with_its_place():
    with pytest.raises(ConfigError, match="w must be a dense tensor with values, but is a nested tensor"):
        encode({"w": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])})


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
        {"$dict": [[[], 1]]},
        {"$dict": [[1, 1], [1, 2]]},
        {"$dict": 3},
        {"$set": [[]]},
        {"$set": 3},
        {"$frozenset": {"a": 1}},
        {"$complex": [1.0]},
        {"$complex": [1.0, "x"]},
        {"$int": 3},
        {"$int": "g"},
        {"$scalar": ["O", ""]},
        {"$scalar": ["<f4", "AAAA"]},
        {"$array": ["<f4", [2], "four"]},
        {"$array": ["<f4", [-1, -1], "four"]},
        {"$array": ["|O", [1], "four"]},
        {"$array": ["V4", [1], "four"]},
        {"$array": ["<f4", [1], "absent"]},
        {"$array": ["<f4", [1], "float"]},
        {"$array": ["<f4"]},
        {"$long_bytes": "float"},
        {"$long_str": "broken"},
        {"$dataclass": ["x"]},
        {"$dataclass": [3, {}]},
        {"$dataclass": ["x", []]},
        {"$dict": [[1]]},
        {"$tuple": [], "x": 1},
        {"$tensor": []},
    ],
)
def test_skeletons_that_encode_never_makes_are_refused(skeleton):
    with pytest.raises(ConfigError, match="must be one that hora"):
        decode(
            skeleton,
            {"four": torch.zeros(4, dtype=torch.uint8), "float": torch.zeros(1), "broken": torch.full((1,), 255, dtype=torch.uint8)},
        )
