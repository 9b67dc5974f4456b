import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hora.plan.algorithm_table import Entry, Table, choose, dump, parse

KNOWN = ("native", "ring", "recursive_doubling", "ordered", "hierarchical")

steps = st.dictionaries(st.integers(0, 1 << 40), st.sampled_from(KNOWN), max_size=5).map(lambda found: tuple(sorted(found.items())))
places = st.tuples(st.sampled_from(["cpu", "cuda"]), st.sampled_from(["shm", "gloo"]), st.integers(1, 3), st.booleans())


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    device, backend, nodes, interleaved = draw(places)
    return Entry(device, backend, draw(st.integers(nodes, 70)), nodes, interleaved, draw(steps))


tables = st.lists(entries(), max_size=8).map(lambda found: Table().updated(found))


def entry(ranks: int = 2, nodes: int = 1, *, backend: str = "gloo", interleaved: bool = False, **steps: int) -> Entry:
    return Entry("cpu", backend, ranks, nodes, interleaved, tuple((begin, name) for name, begin in steps.items()))


@given(table=tables, size=st.integers(0, 1 << 41), place=places, ranks=st.integers(1, 100))
def test_what_is_chosen_was_measured_for_this_kind_of_place_up_to_this_size(table, size, place, ranks):
    device, backend, nodes, interleaved = place
    chosen = choose(table, size, device, backend, ranks, nodes, interleaved=interleaved)
    near = [e for e in table.entries if (e.device, e.backend, e.interleaved, e.nodes > 1) == (device, backend, interleaved, nodes > 1)]
    sizes = {begin for e in near for begin, name in e.steps if name == chosen and begin <= size}
    assert chosen == "native" or (ranks > 1 and sizes)


@given(table=tables, size=st.integers(0, 1 << 41))
def test_at_a_measured_place_the_largest_size_up_to_this_one_counts(table, size):
    for e in table.entries:
        expected = max(((begin, name) for begin, name in e.steps if begin <= size), default=(0, "native"))[1]
        chosen = choose(table, size, e.device, e.backend, e.ranks, e.nodes, interleaved=e.interleaved)
        assert chosen == (expected if e.ranks > 1 else "native")


@given(tables)
def test_a_table_survives_its_file(table):
    assert parse(dump(table), KNOWN) == table


@given(table=tables, data=st.data())
def test_a_damaged_file_is_a_value_error_or_a_table(table, data):
    text = dump(table)
    begin = data.draw(st.integers(0, len(text)))
    damaged = text[:begin] + data.draw(st.text(max_size=3)) + text[data.draw(st.integers(begin, len(text))) :]
    try:
        found = parse(damaged, KNOWN)
    except ValueError:
        return
    assert all(name in KNOWN for each in found.entries for _, name in each.steps)


@pytest.mark.parametrize(
    ("ranks", "chosen"), [(2, "ring"), (3, "ring"), (4, "ring"), (5, "ordered"), (8, "ordered"), (100, "ordered"), (1, "native")]
)
def test_the_nearest_number_of_ranks_counts_by_ratio(ranks, chosen):
    table = Table((entry(2, ring=0), entry(8, ordered=0)))
    assert choose(table, 100, "cpu", "gloo", ranks, 1) == chosen


def test_one_node_is_not_compared_with_several_nor_one_order_of_ranks_with_the_other():
    table = Table((entry(4, 2, hierarchical=4096), entry(4, 2, interleaved=True, hierarchical=1024)))
    assert choose(table, 1 << 20, "cpu", "gloo", 4, 1) == "native"
    assert choose(table, 1 << 20, "cpu", "gloo", 12, 3) == "hierarchical"
    assert [choose(table, 1024, "cpu", "gloo", 4, 2, interleaved=order) for order in (False, True)] == ["native", "hierarchical"]


def test_an_own_table_silences_another_about_the_places_that_it_has():
    own, other = Table((entry(2, ring=0),)), Table((entry(4, ordered=0), entry(4, backend="shm", ordered=0)))
    both = own.over(other)
    assert choose(both, 1, "cpu", "gloo", 4, 1) == "ring"
    assert choose(both, 1, "cpu", "shm", 4, 1) == "ordered"


def test_entries_take_the_place_of_those_for_as_many_ranks():
    table = Table().updated([entry(2, ring=0), entry(4, ring=0)]).updated([entry(2, ordered=0)])
    assert [(each.ranks, each.steps) for each in table.entries] == [(2, ((0, "ordered"),)), (4, ((0, "ring"),))]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ranks": "2"}, "ranks must be of type int, but is '2'"),
        ({"ranks": True}, "ranks must be of type int, but is True"),
        ({"ranks": 1, "nodes": 2}, "must have a node and a rank on each, but has 1 ranks on 2 nodes"),
        ({"steps": {"0": "tree"}}, "unknown algorithm 'tree'; known are native"),
        ({"steps": {"0": ["ring"]}}, "unknown algorithm"),
        ({"steps": {"-1": "ring"}}, "whole numbers of bytes, but one is '-1'"),
        ({"more": 1}, "must have the keys device, backend, ranks, nodes, interleaved, steps, but is"),
    ],
)
def test_a_wrong_entry_is_named(change, problem):
    content = json.loads(dump(Table((entry(ring=0),))))
    content["entries"][0] |= change
    with pytest.raises(ValueError, match=problem):
        parse(json.dumps(content), KNOWN)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"format": 2, "entries": []}', '{"format": 1, "entries": {}}', '{"format": 1'])
def test_what_is_no_table_is_refused(text):
    with pytest.raises(ValueError):
        parse(text, KNOWN)
