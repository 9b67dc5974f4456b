"""Processes that wait to be the ranks of the next generation: here none, and every rank is started when it is needed. `warm_spares` has those that
wait.
"""

from collections.abc import Collection, Sequence
from subprocess import Popen

from hora.launch.guardian import Guardian
from hora.launch.job_directory import new_name
from hora.launch.plan import RankPlan


class Spares:
    """What a launcher has to do about spares. They outlive a generation, and each is for the one that comes next."""

    @property
    def pids(self) -> Collection[int]:
        """Their processes, to be taken leave of here alone."""
        return ()

    def name_directory(self) -> str:
        """The name of the private directory of the generation that begins."""
        return new_name()

    def guard(self, guardian: Guardian | None) -> None:
        """Has them ended with this launcher, in the generation that begins; None when it ends."""

    def take(self, plan: RankPlan, stdout: int, stderr: int) -> "Popen[bytes] | None":  # noqa: ARG002
        """The process that from now on is the rank of `plan`, as if it had just been started; None if there is none for it."""
        return None

    def follow(self, plans: Sequence[RankPlan]) -> None:
        """The ranks of a generation have been started: what is left of the spares goes, and others are to be had for the generation after."""

    def tend(self) -> None:
        """Starts another one, if there is one to start; to be called now and then while the ranks are well under way."""

    def reap(self) -> None:
        """Takes note of those that have ended."""

    def close(self) -> None:
        """Ends all."""
