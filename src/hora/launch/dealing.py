"""Which of the hosts this machine is, and how many ranks each runs. Pure."""

from collections.abc import Callable, Sequence

from hora.errors import ConfigError
from hora.launch.hosts import Host, deal
from hora.launch.options import LaunchOptions
from hora.launch.plan import per_node


def find_here(hosts: Sequence[Host], is_here: Callable[[str], bool]) -> list[int]:
    """The hosts, by index, that are this machine.

    Raises:
        ConfigError: more than one is: two names of one machine, or a name that leads here by mistake.
    """
    here = [index for index, host in enumerate(hosts) if is_here(host.address)]
    if len(here) > 1:
        names = " and ".join(hosts[index].name for index in here)
        raise ConfigError(
            f"{names} are all this machine; name it once, with all its slots. If one of them is another machine, its name leads here by mistake "
            "(a line 127.0.1.1 in /etc/hosts): correct that, or give its address"
        )
    return here


def deal_ranks(options: LaunchOptions, found: Sequence[tuple[int, int]] | None = None) -> tuple[int, ...]:
    """How many ranks each host runs, where that depends on it given the cores and GPUs that were found there.

    Raises:
        ConfigError: there are fewer slots than ranks, or than `--nproc-per-node` says.
    """
    there = found or [(1, 0)] * len(options.hosts)
    return deal([count_slots(options, host, cores, gpus) for host, (cores, gpus) in zip(options.hosts, there, strict=True)], options.nproc)


def count_slots(options: LaunchOptions, host: Host, cores: int = 1, gpus: int = 0) -> int:
    """How many ranks `host` can run, given the cores and GPUs that were found there if that matters; see `deal_ranks`."""
    if options.nproc_per_node is not None:
        counted = per_node(options.nproc_per_node, cores, gpus)
        if host.slots is not None and counted > host.slots:
            raise ConfigError(
                f"--nproc-per-node {options.nproc_per_node} is {counted} on {host.name}, which has {host.slots} slots; give it more (host:N)"
            )
        return counted
    if host.slots is not None:
        return host.slots
    return -(-(options.nproc or 1) // len(options.hosts)) if options.hosts else 1
