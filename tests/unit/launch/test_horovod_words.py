"""What `--horovod` tells the ranks."""

import os
from pathlib import Path

from hora.launch.horovod_words import common_variables, place_variables
from hora.launch.plan import JobFacts, Layout, plan_ranks

ASKED = {"HORA_HOROVOD": "1"}
FACTS = JobFacts("job", "/dir", "unix:///s", "/key", "127.0.0.1", 1, 2)


def test_ranks_are_told_nothing_unless_it_is_asked_for() -> None:
    assert common_variables({}) == {}
    assert place_variables({"HORA_HOROVOD": "0"}, 0, 0, (1,), 0) == {}


def test_the_stand_in_comes_first_on_the_path_and_the_users_own_is_kept() -> None:
    first, *rest = common_variables(ASKED | {"PYTHONPATH": "/a:/b"})["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "horovod.py").is_file()
    assert rest == ["/a", "/b"]
    assert common_variables(ASKED)["PYTHONPATH"] == first


def test_cross_rank_counts_the_nodes_that_have_a_rank_of_this_place() -> None:
    plans = plan_ranks(Layout((3, 1, 2), 2), ["python"], FACTS, ASKED, 4)
    told = [
        [plan.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")]
        for plan in plans
    ]
    assert told == [["4", "6", "0", "2", "2", "3"], ["5", "6", "1", "2", "1", "2"]]
    assert "HOROVOD_RANK" not in plan_ranks(Layout((1,), 0), ["python"], FACTS, {}, 4)[0].environ
