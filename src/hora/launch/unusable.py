"""The errors of hosts that a job cannot have, which know the hosts, so that a job can be started anew without them."""

from collections.abc import Collection

from hora.errors import ConfigError, LaunchError


class HostsUnusable(LaunchError):
    """Hosts cannot be used, or have not answered in time: `nodes`."""

    def __init__(self, message: str, nodes: Collection[int]) -> None:
        super().__init__(message)
        self.nodes = nodes


class HostsRefused(ConfigError):
    """Hosts have refused something that the user gave: `nodes`."""

    def __init__(self, message: str, nodes: Collection[int]) -> None:
        super().__init__(message)
        self.nodes = nodes
