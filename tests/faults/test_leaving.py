"""A rank that cannot leave the job ends all the same, and says so."""

from launcher_kit import Start

from hora.exits import FAILED

STUCK = """
import hora
from hora.comm import leaving
from hora.comm.session import session

leaving.LEAST_S = 3.0
hora.init(timeout_s=2.0)
session().release.callback(time.sleep, 600)
print("all done", flush=True)
"""


def test_a_rank_that_cannot_leave_is_ended_at_its_deadline(start: Start) -> None:
    job = start(STUCK)
    assert job.wait() == FAILED
    assert "could not leave the job within 3 s" in job.err
    assert "all done" in job.out
