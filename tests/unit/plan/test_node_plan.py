import pytest

from hora.plan.nodes import Nodes


@pytest.mark.parametrize(
    ("node_of_rank", "ranks", "counterparts", "flat", "even"),
    [
        ((0, 0, 1, 1), ((0, 1), (2, 3)), ((0, 2), (1, 3)), False, True),
        ((0, 1, 0, 1), ((0, 2), (1, 3)), ((0, 1), (2, 3)), False, True),
        ((1, 0, 0), ((1, 2), (0,)), ((1, 0),), False, False),
        ((0, 0, 0), ((0, 1, 2),), ((0,), (1,), (2,)), True, True),
        ((0, 1, 2), ((0,), (1,), (2,)), ((0, 1, 2),), True, True),
        ((0,), ((0,),), ((0,),), True, True),
    ],
)
def test_ranks_are_placed_by_node(node_of_rank, ranks, counterparts, flat, even):
    nodes = Nodes.of(node_of_rank)
    assert (nodes.ranks, nodes.counterparts, nodes.flat, nodes.even) == (ranks, counterparts, flat, even)


@pytest.mark.parametrize(
    ("node_of_rank", "interleaved"),
    [((0, 0, 1, 1), False), ((0, 1, 0, 1), True), ((1, 0, 0), False), ((0, 1, 0, 0), True), ((0, 1, 2), False), ((0,), False)],
)
def test_nodes_are_interleaved_where_neighbours_stand_apart(node_of_rank, interleaved):
    assert Nodes.of(node_of_rank).interleaved is interleaved
