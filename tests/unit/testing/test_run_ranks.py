"""What goes wrong on a rank is reported as what it is, and the ranks are whole again afterwards."""

import os
import signal
import threading
import warnings
from pathlib import Path

import pytest
import torch

import hora
from hora.errors import ConfigError
from hora.testing import Outcome, run_ranks
from hora.testing.pool import RankPools

HOW = {"device": "cpu"}


def run(pools: RankPools, body, world_size: int = 2, timeout_s: float = 30.0, **arguments) -> list[Outcome]:
    return pools.run(body, arguments, world_size=world_size, how=HOW, timeout_s=timeout_s)


def kinds(outcomes: list[Outcome]) -> list[str]:
    return [outcome.kind for outcome in outcomes]


def body_tells_its_place() -> list[int]:
    return [hora.rank(), hora.world_size(), os.getpid(), torch.get_num_threads()]


def body_fails_on_rank_1() -> None:
    print("something printed")
    answer = 41 + hora.rank()
    assert answer == 41, "the answer is off"


def body_dies(how: str) -> None:
    if hora.rank() == 1:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.Signals[how])
    hora.barrier()


def body_waits_for_ever() -> None:
    if hora.rank() == 1:
        threading.Event().wait()


def body_stops() -> None:
    if hora.rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def body_fails_while_others_wait() -> None:
    if hora.rank() == 1:
        raise ValueError("no more")
    threading.Event().wait()


def body_fails_in_a_thread() -> None:
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()


class _Grumpy:
    def __init__(self) -> None:
        self.myself = self  # only the garbage collector will find it

    def __del__(self) -> None:
        raise ValueError("not even dead in peace")


def body_fails_in_a_finalizer() -> None:
    _Grumpy()


def body_warns() -> None:
    warnings.warn("careful", stacklevel=1)


def body_leaves_a_variable() -> None:
    os.environ["LEFT_BEHIND"] = "1"


def body_leaves_a_thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def body_skips() -> None:
    pytest.skip("not today")


def body_ends_its_session() -> None:
    hora.shutdown()


def body_checks_arguments(number, text, nothing, numbers, mapping, path) -> None:
    assert (number, text, nothing, numbers, mapping) == (1.5, "é", None, [1, [2]], {"a": {"b": 1}})
    assert path == Path("/some/where")


def body_draws_random_numbers() -> list[float]:
    return torch.rand(3).tolist()


def test_ranks_know_their_place_and_use_one_thread(rank_pools):
    for world_size in (1, 2, 3):
        outcomes = run(rank_pools, body_tells_its_place, world_size)
        assert [(rank, size, threads) for rank, size, _, threads in (outcome.result for outcome in outcomes)] == [
            (rank, world_size, 1) for rank in range(world_size)
        ]


def test_ranks_are_reused_after_a_pass_and_replaced_after_a_failure(rank_pools):
    def pids() -> set[int]:
        return {outcome.result[2] for outcome in run(rank_pools, body_tells_its_place)}

    first = pids()
    assert pids() == first
    run(rank_pools, body_fails_on_rank_1)
    assert not pids() & first


def test_ranks_are_replaced_when_a_body_ends_their_session(rank_pools):
    outcomes = run(rank_pools, body_ends_its_session)
    assert kinds(outcomes) == ["passed", "passed"], outcomes
    assert kinds(run(rank_pools, body_tells_its_place)) == ["passed", "passed"]


def test_failed_assert_shows_rank_values_and_output(rank_pools):
    good, bad = run(rank_pools, body_fails_on_rank_1)
    assert (good.kind, bad.kind) == ("passed", "failed")
    assert "the answer is off" in bad.text
    assert "assert 42 == 41" in bad.text
    assert "body_fails_on_rank_1" in bad.text
    assert bad.printed == "something printed\n"


@pytest.mark.parametrize(
    ("how", "text"), [("exit", "exited with code 3"), ("SIGKILL", "killed by SIGKILL"), ("SIGSEGV", "killed by SIGSEGV")]
)
def test_death_is_told_with_its_cause(rank_pools, how, text):
    _, dead = run(rank_pools, body_dies, how=how)
    assert (dead.kind, dead.text) == ("died", text)


def test_hang_is_told_with_the_stack(rank_pools):
    good, hung = run(rank_pools, body_waits_for_ever, timeout_s=1.0)
    assert (good.kind, hung.kind) == ("passed", "hung")
    assert "still running after 1 s" in hung.text
    assert "body_waits_for_ever" in hung.text


def test_stopped_process_is_told_from_one_that_runs(rank_pools):
    _, stopped = run(rank_pools, body_stops, timeout_s=1.0)
    assert (stopped.kind, stopped.text) == ("hung", "is stopped after 1 s")


def test_ranks_that_wait_for_a_failed_one_are_ended_and_not_blamed(rank_pools):
    waiting, failed = run(rank_pools, body_fails_while_others_wait)
    assert (waiting.kind, failed.kind) == ("ended", "failed")
    assert "ValueError: no more" in failed.text
    assert not waiting.bad


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (body_fails_in_a_thread, "ZeroDivisionError"),
        (body_fails_in_a_finalizer, "not even dead in peace"),
        (body_warns, "UserWarning: careful"),
        (body_leaves_a_variable, "variable LEFT_BEHIND = '1', which was None"),
        (body_leaves_a_thread, "left behind on this rank: thread"),
    ],
)
def test_what_nobody_caught_or_cleaned_up_fails_the_rank(rank_pools, body, text):
    (outcome,) = run(rank_pools, body, world_size=1)
    assert outcome.kind == "failed"
    assert text in outcome.text


def test_arguments_arrive_as_they_were(rank_pools):
    arguments = {"number": 1.5, "text": "é", "nothing": None, "numbers": (1, [2]), "mapping": {"a": {"b": 1}}, "path": Path("/some/where")}
    assert kinds(run(rank_pools, body_checks_arguments, **arguments)) == ["passed", "passed"]


def test_seed_is_the_same_for_every_body_and_rank(rank_pools):
    draws = [outcome.result for _ in range(2) for outcome in run(rank_pools, body_draws_random_numbers)]
    assert draws == [draws[0]] * 4


def test_body_inside_a_function_is_refused(rank_pools):
    def inner() -> None: ...

    with pytest.raises(ValueError, match="top of its module"):
        run(rank_pools, inner)


@run_ranks(1, 2)
@pytest.mark.parametrize("value", [7])
def test_decorated_body_gets_parameters_and_fixtures(world_size, value, tmp_path):
    assert (hora.world_size(), value) == (world_size, 7)
    assert tmp_path.is_dir()


def test_decorator_fails_and_skips_in_pytest(rank_pools):
    failing, skipping = run_ranks(2)(body_fails_on_rank_1), run_ranks(2)(body_skips)
    with pytest.raises(pytest.fail.Exception, match=r"rank 1 of 2 failed(?s:.)*something printed(?s:.)*rank 0 of 2 passed"):
        failing(rank_pools=rank_pools, world_size=2)
    with pytest.raises(pytest.skip.Exception, match="not today"):
        skipping(rank_pools=rank_pools, world_size=2)


def test_decorator_marks_tests_for_gpus():
    assert "gpu" in {mark.name for mark in run_ranks(1, backend="nccl")(body_skips).pytestmark}


@run_ranks(3, nodes=(1, 0, 1))
def test_ranks_believe_that_they_stand_on_several_nodes():
    topology = hora.session().topology
    assert (topology.node_rank, topology.num_nodes) == ((1, 0, 1)[hora.rank()], 2)
    assert (topology.local_rank, topology.local_world_size) == [(0, 2), (0, 1), (1, 2)][hora.rank()]


def test_nodes_are_of_all_ranks():
    with pytest.raises(ConfigError, match="must name the node of each of"):
        run_ranks(2, 3, nodes=(0, 1))
