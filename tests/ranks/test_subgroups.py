"""Collectives among some of the ranks."""

import pytest
import torch

import hora
from hora.errors import CollectiveMismatch, ConfigError
from hora.testing import run_ranks


def groups_of_two(world_size: int) -> list:
    """Each rank with the next one."""
    return [hora.new_group([rank, (rank + 1) % world_size]) for rank in range(world_size)]


@run_ranks(2, 3, 4)
def test_only_members_take_part(world_size):
    rank = hora.rank()
    for number, group in enumerate(groups_of_two(world_size)):
        first, second = sorted((number, (number + 1) % world_size))
        assert (group.ranks, group.world_size, group.is_member) == ((first, second), 2, rank in (first, second))
        if not group.is_member:
            continue
        assert group.rank == group.ranks.index(rank)
        total = first + second
        assert hora.all_reduce(torch.full((3,), float(rank)), group=group).eq(total).all()
        assert hora.all_reduce(torch.full((3,), float(rank)), "mean", group=group, async_op=True).wait().eq(total / 2).all()
        assert hora.all_reduce(torch.full((3,), rank), "max", algorithm="ring", group=group).eq(max(first, second)).all()
        assert hora.broadcast(torch.full((2,), rank), 1, group=group).eq(second).all()
        assert [part.tolist() for part in hora.all_gather(torch.full((rank,), rank), group=group)] == [[first] * first, [second] * second]
        assert hora.reduce_scatter(torch.full((5,), float(rank)), group=group).tolist() == [float(total)] * (3 - group.rank)
        letters = hora.all_to_all([torch.tensor([rank, to]) for to in range(2)], group=group)
        assert [letter.tolist() for letter in letters] == [[first, group.rank], [second, group.rank]]
        assert hora.all_reduce_coalesced([torch.ones(2), torch.ones(1, dtype=torch.int64)], group=group)[1].item() == 2
        hora.barrier(group=group)
    assert hora.all_reduce(torch.ones(1)).item() == world_size


@run_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("size", [3, 700_000])  # inside the message, and in chunks after it
def test_objects_go_to_members_alone(world_size, size):
    group = hora.new_group(range(world_size - 1, max(world_size - 3, -1), -1))  # the last two
    hora.barrier()
    if not group.is_member:
        return

    def tree(rank):
        return {"rank": rank, "values": torch.full((size,), float(rank)), ("a", 1): None}

    def check(found, rank):
        assert (found["rank"], found["values"].eq(rank).all().item(), found["values"].numel()) == (rank, True, size)

    mine, last = group.ranks[group.rank], group.world_size - 1
    check(hora.broadcast_object(tree(mine) if group.rank == last else None, last, group=group), group.ranks[last])
    for rank, found in zip(group.ranks, hora.all_gather_object(tree(mine), group=group), strict=True):
        check(found, rank)
    gathered = hora.gather_object(tree(mine), last, group=group)
    assert (gathered is None) == (group.rank != last)
    for rank, found in zip(group.ranks, gathered or [], strict=False):
        check(found, rank)
    check(
        hora.scatter_object([tree(10 + place) for place in range(group.world_size)] if group.rank == 0 else None, group=group),
        10 + group.rank,
    )


@run_ranks(2, 3, 4)
def test_messages_count_ranks_within_the_group(world_size):
    group = hora.new_group([world_size - 1, 0])
    if not group.is_member:
        return
    other = 1 - group.rank
    received = torch.zeros(5, dtype=torch.int16)
    for first in (0, 1):
        if group.rank == first:
            hora.send(torch.full((5,), hora.rank(), dtype=torch.int16), other, group=group)
        else:
            assert hora.recv(received, other, group=group).eq(group.ranks[other]).all()
    with pytest.raises(ConfigError, match="dst must be a rank from 0 to 1"):
        hora.send(received, 2, group=group)
    with pytest.raises(ConfigError, match="dst must be another rank"):
        hora.send(received, group.rank, group=group)


@run_ranks(3)
def test_an_object_that_cannot_be_sent_is_refused_in_the_group():
    group = hora.new_group([0, 2])
    if group.is_member:
        with pytest.raises(ConfigError, match="rank 1 cannot send an object"):
            hora.all_gather_object(object() if group.rank == 1 else 1, group=group)
    assert hora.all_gather_object(hora.rank()) == [0, 1, 2]


@run_ranks(3, 4)
def test_groups_work_side_by_side_while_others_do_something_else(world_size):
    first, second = hora.new_group([0, 1]), hora.new_group(range(2, world_size))
    mine = first if first.is_member else second
    for number in range(20 if mine is first else 5):
        assert hora.all_reduce(torch.tensor([float(number)]), group=mine).item() == number * mine.world_size
    assert hora.all_reduce(torch.ones(1)).item() == world_size


@run_ranks(1, 2)
def test_a_group_of_one_and_a_group_of_all(world_size):
    alone, everybody = hora.new_group([0]), hora.new_group(range(world_size))
    assert hora.all_reduce(torch.ones(1), group=everybody).item() == world_size
    if alone.is_member:
        assert hora.all_reduce(torch.ones(1), group=alone).item() == 1.0
        assert len(hora.all_gather(torch.ones(1), group=alone)) == 1


@run_ranks(3)
def test_calls_that_differ_are_named_with_the_ranks_of_the_session():
    group = hora.new_group([2, 0])
    if group.is_member:
        with pytest.raises(
            CollectiveMismatch, match=r"rank 0 is about to all_reduce float32 \[3\] .*; rank 2 is about to all_reduce float32 \[2\]"
        ):
            hora.all_reduce(torch.ones(2 if hora.rank() == 2 else 3), group=group)
        assert hora.all_reduce(torch.ones(1), group=group).item() == 2.0
    with pytest.raises(CollectiveMismatch, match=r"new_group of ranks \[0, 1\].*new_group of ranks \[0, 2\]"):
        hora.new_group([0, 1] if hora.rank() == 0 else [0, 2])


@run_ranks(2)
def test_mistakes_are_refused():
    for ranks in ([], [0, 0], [0, 2], [-1]):
        with pytest.raises(ConfigError, match="ranks must be some of 0 to 1, each once"):
            hora.new_group(ranks)
    group = hora.new_group([1])
    if hora.rank() == 0:
        assert group.rank == -1
        for call in (lambda: hora.all_reduce(torch.ones(1), group=group), lambda: hora.barrier(group=group)):
            with pytest.raises(ConfigError, match=r"only ranks \[1\] can use this group, but this is rank 0"):
                call()
    both = hora.new_group([0, 1])
    with pytest.raises(ConfigError, match="src must be a rank from 0 to 1, but is 2"):
        hora.broadcast(torch.ones(1), 2, group=both)
