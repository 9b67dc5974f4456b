"""Processes that are forked from a rank: they have no part in the job, and their end is not the rank's."""

import os

import pytest
import torch
import torch.distributed as dist

import hora
from hora.errors import ConfigError, HoraError


def in_a_child(act) -> str:
    """What `act` raises in a forked process, which then ends as a script does."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            act()
            said = "nothing"
        except (HoraError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
        os.write(sending, said.encode())
        hora.shutdown()
        if dist.is_initialized() and dist.get_backend() == "shm":
            dist.destroy_process_group()
        os._exit(0)
    os.close(sending)
    os.waitpid(child, 0)
    with os.fdopen(receiving) as pipe:
        return pipe.read()


def body_that_forks(what: str) -> list:
    hora.all_reduce(torch.ones(1))
    acts = {
        "nothing": lambda: None,
        "all_reduce": lambda: hora.all_reduce(torch.ones(3)),
        "raw": lambda: dist.all_reduce(torch.ones(3)),
        "send": lambda: dist.send(torch.ones(3), 1),
        "init": lambda: hora.init(),
    }
    said = in_a_child(acts[what]) if hora.rank() == 0 else ""
    return [said, [hora.all_reduce(torch.full((3,), 1.0 + number)).tolist() for number in range(3)]]


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("nothing", "nothing"),
        ("all_reduce", f"{HoraError.__name__}: a process that is forked from a rank must make no collectives"),
        ("raw", "RuntimeError: a process that is forked from a rank must make no collectives"),
        ("send", "RuntimeError: a process that is forked from a rank must make no collectives"),
        ("init", f"{ConfigError.__name__}: this process was forked from that of rank 0"),
    ],
)
def test_forked_process_has_no_part_and_its_end_is_its_own(spawn_ranks, what, error):
    first, second = spawn_ranks(2, body_that_forks, what=what).wait()
    assert first.result[0].startswith(error)
    assert first.result[1] == second.result[1] == [[2.0] * 3, [4.0] * 3, [6.0] * 3]


def test_script_may_destroy_the_group_itself(spawn_ranks):
    assert [outcome.result for outcome in spawn_ranks(2, body_that_destroys_the_group).wait()] == [2.0, 2.0]


def body_that_destroys_the_group() -> float:
    total = hora.all_reduce(torch.ones(1)).item()
    dist.destroy_process_group()
    hora.shutdown()
    assert not hora.is_initialized()
    return total
