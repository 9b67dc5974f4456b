"""Which hosts a job runs on, from one generation to the next: here those that it was given, and all of them. `host_scout` looks for others."""

from collections.abc import Collection

from hora.launch.guardian import Guardian
from hora.launch.options import LaunchOptions


class Scout:
    """What a launcher has to do about hosts that come and go. It outlives a generation."""

    pids: Collection[int] = ()
    """Its processes, to be taken leave of here alone."""

    deadline: float | None = None
    """When to call `tend`; None: it need not be called."""

    def muster(self, options: LaunchOptions, lost: Collection[int] = ()) -> LaunchOptions | None:  # noqa: ARG002
        """The job on the hosts of its next start, when those of `lost`, by index, are gone; None if there are too few.

        Raises:
            ConfigError: the hosts cannot be had, at the first start.
            Interrupted: a signal came while it waited.
        """
        return options

    def may_miss(self, generation: int) -> bool:  # noqa: ARG002
        """Whether a generation can begin without hosts that cannot be used."""
        return False

    def guard(self, guardian: Guardian | None) -> None:
        """Has its processes ended with this launcher, in the generation that begins; None when it ends."""

    def tend(self, now: float) -> bool:  # noqa: ARG002
        """Looks around, without waiting; whether the ranks are to save and to end now, so that the job can go on on other hosts."""
        return False

    def close(self) -> None:
        """Ends what it has started."""
