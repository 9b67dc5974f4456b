"""The launchers on other hosts that this one has started: here none, and there is nothing to do. `remotes` has those that are."""

from collections.abc import Collection, Iterable

from hora.launch import report
from hora.launch.guardian import Guardian
from hora.launch.job_events import Shared


class Others:
    """What a launcher has to do about the launchers that it started."""

    pids: Collection[int] = ()
    """Processes of this machine that are theirs, to be taken leave of here alone."""

    def guard(self, guardian: Guardian) -> None:
        """Has them ended with this launcher."""

    def signal(self, signum: int) -> None:
        """Passes a signal on that concerns ranks, and not the job."""

    def reap(self) -> Iterable[Shared]:
        """What has happened to them since the last time."""
        return ()

    def pending(self) -> bool:
        """Whether output of their ranks may still come; False after a deadline."""
        return False

    def explain_loss(self, node: int) -> str:
        """What is known of a launcher that is gone."""
        return report.explain_loss(node)
