import itertools
import math

import pytest

from hora.errors import ConfigError
from hora.plan.logical import LogicalRanks, split

CASES = [(count, world_size) for count in range(1, 18) for world_size in range(1, count + 1)]


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("length", [0, 1, 2, 6, 7, 8, 100])
def test_parts_are_contiguous_whole_and_of_nearly_one_size(length: int, parts: int) -> None:
    found = [split(range(5, 5 + length), parts, index) for index in range(parts)]
    assert list(itertools.chain(*found)) == list(range(5, 5 + length))
    sizes = [len(part) for part in found]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("count", "world_size"), CASES)
def test_each_logical_rank_is_played_once(count: int, world_size: int) -> None:
    logical_ranks = LogicalRanks(count, world_size)
    played = [logical_ranks.played_by(rank) for rank in range(world_size)]
    assert list(itertools.chain(*played)) == list(range(count))
    assert all(played)


@pytest.mark.parametrize(("count", "world_size"), CASES)
def test_a_ranks_share_is_what_its_logical_ranks_get(count: int, world_size: int) -> None:
    logical_ranks = LogicalRanks(count, world_size)
    for length, rank in itertools.product([0, 1, count - 1, 3 * count + 1], range(world_size)):
        parts = [split(range(length), count, logical_rank) for logical_rank in logical_ranks.played_by(rank)]
        assert list(logical_ranks.share(range(length), rank)) == list(itertools.chain(*parts))


def tree(leaves: range, count: int) -> set[range]:
    """All nodes of the tree of sums over range(`count`), from the top."""
    if len(leaves) == 1:
        return {leaves}
    half = 1
    while 2 * half < len(leaves):
        half *= 2
    return {leaves} | tree(leaves[:half], count) | tree(leaves[half:], count)


@pytest.mark.parametrize(("count", "world_size"), CASES)
def test_subtrees_are_the_largest_nodes_of_one_tree(count: int, world_size: int) -> None:
    logical_ranks, nodes = LogicalRanks(count, world_size), tree(range(count), count)
    for rank in range(world_size):
        played, subtrees = logical_ranks.played_by(rank), logical_ranks.subtrees(rank)
        assert list(itertools.chain(*subtrees)) == list(played)
        inside = {node for node in nodes if played.start <= node.start and node.stop <= played.stop}
        largest = [node for node in inside if not any(node != other and set(node) < set(other) for other in inside)]
        assert subtrees == sorted(largest, key=lambda node: node.start)


def test_eight_logical_ranks_on_three_make_two_two_and_one_sums() -> None:
    logical_ranks = LogicalRanks(8, 3)
    assert [len(logical_ranks.played_by(rank)) for rank in range(3)] == [3, 3, 2]
    assert [len(logical_ranks.subtrees(rank)) for rank in range(3)] == [2, 2, 1]


@pytest.mark.parametrize(("count", "world_size"), [(8, 0), (8, 9), (0, 1), (0, 0)])
def test_a_rank_with_nothing_to_play_is_refused(count: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match="each real rank plays at least one logical rank"):
        LogicalRanks(count, world_size)


@pytest.mark.parametrize("count", range(1, 18))
def test_sums_of_ranks_and_then_over_ranks_are_those_of_the_tree(count: int) -> None:
    """Written out as an expression, the sum is one and the same for every number of ranks."""

    def written(node: range) -> str:
        if len(node) == 1:
            return str(node[0])
        half = 2 ** (math.ceil(math.log2(len(node))) - 1)
        return f"({written(node[:half])}+{written(node[half:])})"

    expected = written(range(count))
    for world_size in range(1, count + 1):
        logical_ranks, everybodys = LogicalRanks(count, world_size), []
        for rank in range(world_size):
            partials: list[tuple[range, str]] = []
            for leaf in logical_ranks.played_by(rank):
                logical_ranks.push(partials, range(leaf, leaf + 1), str(leaf), lambda a, b: f"({a}+{b})")
            assert [leaves for leaves, _ in partials] == logical_ranks.subtrees(rank)
            everybodys += partials
        assert logical_ranks.total(everybodys, lambda a, b: f"({a}+{b})") == expected
