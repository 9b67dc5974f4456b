import os
import socket

import psutil
import pytest
import torch
from rank_records import record

from hora.comm.records import Settings, digest_of_script, flatten_config, introduce, neighbours_of, number_nodes, place_by_hosts, say_ranks
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


@pytest.mark.parametrize(
    ("hosts", "guessed", "nodes"),
    [
        ("aabb", [0, 0, 1, 1], [0, 0, 1, 1]),
        ("abab", [0, 0, 1, 1], [0, 1, 0, 1]),  # dealt out node by node, as by `mpirun -map-by node`
        ("aaabb", [0, 0, 0, 1, 2], [0, 0, 0, 1, 1]),  # what ranks guess who see 3 and 2 of them on their nodes
        ("aaaa", [0, 0, 1, 1], [0, 0, 1, 1]),  # on one machine as if it were two
    ],
)
def test_nodes_that_were_guessed_are_numbered_by_hosts_where_these_say_otherwise(hosts, guessed, nodes):
    records = [record(rank, host=host, node_rank=node, local_rank=7) for rank, (host, node) in enumerate(zip(hosts, guessed, strict=True))]
    assert [(each.node_rank, each.local_rank) for each in number_nodes(records)] == [(node, 7) for node in nodes]


@pytest.mark.parametrize(("ranks", "text"), [([2], "rank 2"), ([2, 3], "ranks 2 and 3"), ([1, 2, 3], "ranks 1, 2 and 3")])
def test_ranks_read_as_a_list(ranks, text):
    assert say_ranks(ranks) == text


def test_scripts_are_told_apart_by_their_text_but_for_who_runs_them(tmp_path):
    texts = {"one": "#!/a/python\nprint(1)\n", "same": "#!/b/python\nprint(1)\n", "other": "#!/a/python\nprint(2)\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    one, same, other = (digest_of_script(str(tmp_path / name)) for name in texts)
    assert one == same != other
    assert one.startswith("sha256 ")
    assert digest_of_script(None) == digest_of_script(str(tmp_path / "missing")) == "none"


def test_configuration_is_compared_as_text_by_dotted_names():
    config = {"lr": 0.1, "model": {"size": 8, "act": print, "names": {"b", "a"}}, "long": "x" * 500, "made": object()}
    flat = dict(flatten_config(config))
    assert (flat["lr"], flat["model.size"], flat["model.names"]) == ("0.1", "8", """["'a'", "'b'"]""")
    assert len(flat["long"]) < 250
    assert "sha256" in flat["long"]
    assert "0x" not in flat["made"]
