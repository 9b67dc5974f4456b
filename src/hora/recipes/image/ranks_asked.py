"""What the words of example scripts say about ranks: `--nodes --gpus --nr`, and `--world-size --rank --dist-url` of PyTorch's ImageNet example. Pure.

`--world-size` has two meanings there, nodes with `--multiprocessing-distributed` and processes without it, and mixing them up leaves processes
that wait for others for ever; here words that do not go together are refused, with the reason.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from hora.errors import ConfigError


@dataclass(frozen=True)
class RankWords:
    """The words as they were given; None: not given."""

    nproc: int | None = None
    nodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    world_size: int | None = None
    rank: int | None = None
    dist_url: str | None = None
    multiprocessing_distributed: bool = False


@dataclass(frozen=True)
class Start:
    """Ranks to start here: so many a node (None: one for each GPU), and which node this is."""

    nproc: int | None
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None


@dataclass(frozen=True)
class Join:
    """This process is one of those that somebody starts one by one."""

    rank: int
    world_size: int
    init_method: str


def understand(words: RankWords) -> Start | Join:
    """What the words together ask for.

    Raises:
        ConfigError: they do not go together; all that is wrong is named.
    """
    if problems := list(_problems(words)):
        raise ConfigError("; ".join(problems))
    address, port = words.master_addr, words.master_port
    if words.dist_url is not None and words.dist_url.startswith("tcp://"):
        address, port = _address(words.dist_url)
    address = address or "127.0.0.1"
    if words.multiprocessing_distributed:
        return Start(words.nproc, words.world_size or 1, words.rank or 0, address, port)
    if words.world_size is not None:
        return Join(words.rank or 0, words.world_size, words.dist_url or "env://")
    return Start(words.nproc or 1, words.nodes or 1, words.node_rank or 0, address, port)


def require_none(words: RankWords, source: str) -> None:
    """Of a process that `source` has started as a rank already.

    Raises:
        ConfigError: `words` ask for ranks all the same. `--dist-url env://` says no more than what is so.
    """
    if replace(words, dist_url=None if words.dist_url == "env://" else words.dist_url) != RankWords():
        given = ", ".join(f"{name} = {value}" for name, value in vars(words).items() if value)
        raise ConfigError(
            f"this process is a rank already, by the variables of {source}, so it cannot start or join others ({given}); leave these options out, "
            "or unset the variables"
        )


def _problems(words: RankWords) -> Iterator[str]:
    ours = {"--nodes": words.nodes, "--nr": words.node_rank, "--master-addr": words.master_addr, "--master-port": words.master_port}
    theirs = {"--world-size": words.world_size, "--rank": words.rank, "--dist-url": words.dist_url}
    mixed = [name for name, value in ours.items() if value is not None]
    if mixed and any(value is not None for value in theirs.values()):
        given = [name for name, value in theirs.items() if value is not None]
        yield (
            f"{', '.join(mixed)} and {', '.join(given)} are two ways of saying the same: give --nodes, --nr and --master-addr, or "
            "--world-size, --rank and --dist-url"
        )
        return
    yield from _problems_of_url(words.dist_url)
    if words.world_size is None:
        if words.rank is not None or words.dist_url is not None:
            yield "--rank and --dist-url say which of --world-size this is and where they meet, so --world-size must be given with them"
        yield from _problems_of_count("--nodes", words.nodes, "--nr", words.node_rank)
        if (words.nodes or 1) > 1 and words.master_addr is None:
            yield "with --nodes greater than 1 the nodes meet at node 0, so --master-addr must give an address of it that all reach"
        return
    if words.multiprocessing_distributed:
        yield from _problems_of_count("--world-size (nodes, with --multiprocessing-distributed)", words.world_size, "--rank", words.rank)
        if words.world_size > 1 and not (words.dist_url or "").startswith("tcp://"):
            yield "several nodes meet at node 0, so --dist-url must be tcp://HOST:PORT with an address of it that all reach"
        return
    yield from _problems_of_count("--world-size (processes, without --multiprocessing-distributed)", words.world_size, "--rank", words.rank)
    if words.nproc is not None and words.nproc > 1:
        yield (
            f"--world-size without --multiprocessing-distributed makes this command one process of {words.world_size}, but --nproc {words.nproc} "
            "asks for several; add --multiprocessing-distributed, with which --world-size counts nodes"
        )
    if words.dist_url is None:
        yield f"this command is one process of {words.world_size}, so --dist-url must say where they meet: tcp://HOST:PORT of rank 0"


def _problems_of_count(count_name: str, count: int | None, index_name: str, index: int | None) -> Iterator[str]:
    if count is not None and count < 1:
        yield f"{count_name} must be at least 1, but is {count} instead"
    elif count is not None and count > 1 and index is None:
        yield f"{count_name} is {count}, so {index_name} must say which of them this is: each command gets another one, from 0 to {count - 1}"
    elif index is not None and not 0 <= index < (count or 1):
        yield f"{index_name} must be from 0 to {(count or 1) - 1}, less than {count_name}, but is {index} instead"


def _problems_of_url(url: str | None) -> Iterator[str]:
    if url is None or url.startswith(("file://", "env://")):
        return
    if not url.startswith("tcp://"):
        yield f"--dist-url must begin with tcp://, file:// or env://, but is {url!r} instead"
        return
    try:
        host, _ = _address(url)
    except ValueError as error:
        yield f"--dist-url must be tcp://HOST:PORT, but is {url!r} instead ({error})"
        return
    if host.split(".")[0].isdigit() and 224 <= int(host.split(".")[0]) < 240:
        yield f"--dist-url names {host}, a multicast address, at which no process can listen; give an address of node 0"


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        raise ValueError("a host and a port are needed")
    return parts.hostname, parts.port
