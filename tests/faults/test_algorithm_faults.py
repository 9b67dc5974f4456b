"""A rank that is lost in the middle of an algorithm's messages, after the roll was called: the others are told, none waits for ever."""

import os
import signal
import time

import pytest
import torch

import hora
from hora.comm.algorithms import recursive_doubling, ring

TIMEOUT_S, LOOK_S = 2.0, 4.0
MODULES = {"ring": ring, "recursive_doubling": recursive_doubling}
NEEDED_AFTER = {"ring": 1, "recursive_doubling": 0}
"""After so many exchanges of rank 1 the others still need it."""


def body_loses_rank_1_between_exchanges(algorithm: str, blow: int) -> list:
    module = MODULES[algorithm]
    exchange, count = module.exchange, 0

    def spoilt(*arguments):
        nonlocal count
        if count == NEEDED_AFTER[algorithm] and hora.rank() == 1:
            os.kill(os.getpid(), blow)
        count += 1
        return exchange(*arguments)

    module.exchange = spoilt
    begun = time.monotonic()
    try:
        hora.all_reduce(torch.ones(1024), algorithm=algorithm)
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - begun]
    return ["nothing", "", time.monotonic() - begun]


@pytest.mark.parametrize(
    ("algorithm", "blow", "kind"),
    [
        ("ring", signal.SIGKILL, "PeerLost"),
        ("recursive_doubling", signal.SIGKILL, "PeerLost"),
        ("ring", signal.SIGSTOP, "CollectiveTimeout"),
    ],
)
def test_a_rank_that_is_lost_between_messages_is_named(spawn_ranks, algorithm, blow, kind):
    ranks = spawn_ranks(3, body_loses_rank_1_between_exchanges, init={"timeout_s": TIMEOUT_S}, algorithm=algorithm, blow=int(blow))
    for outcome in ranks.wait(but=1):
        assert outcome.kind == "passed", outcome
        found, text, seconds = outcome.result
        assert found == kind, text
        assert "Rank 1 (process" in text
        assert seconds < TIMEOUT_S + LOOK_S
