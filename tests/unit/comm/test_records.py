import os
import socket

import psutil
import pytest
import torch
from rank_records import record

from hora.comm.records import Settings, introduce, neighbours_of, place_by_hosts, say_ranks
from hora.topology import Topology


def test_rank_introduces_this_process(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    mine = introduce(Topology(1, 4, 1, 2, 0, 2), "gloo", torch.device("cpu"), Settings())
    assert (mine.rank, mine.world_size, mine.local_rank, mine.node_rank, mine.backend, mine.device_type) == (1, 4, 1, 0, "gloo", "cpu")
    assert (mine.host, mine.pid, mine.started_s) == (socket.gethostname(), os.getpid(), psutil.Process().create_time())
    assert (mine.torch, mine.num_gpus, mine.visible_gpus) == (torch.__version__, 0, "3")


def test_nodes_are_counted_from_hosts_in_order_of_rank():
    records = place_by_hosts([record(0, host="b"), record(1, host="a"), record(2, host="b"), record(3, host="a")])
    assert [(each.node_rank, each.local_rank) for each in records] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [each.rank for each in neighbours_of(records[3], records)] == [1, 3]


@pytest.mark.parametrize(("ranks", "text"), [([2], "rank 2"), ([2, 3], "ranks 2 and 3"), ([1, 2, 3], "ranks 1, 2 and 3")])
def test_ranks_read_as_a_list(ranks, text):
    assert say_ranks(ranks) == text
