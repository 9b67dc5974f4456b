"""By the name of a variant, how its steps are made."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from hora.comm.objects import broadcast_object
from hora.comm.session import session
from hora.compare.plain import DataParallelStep, DdpStep, HorovodStep, PlainMaker, SumStep, TwinStep
from hora.compare.request import REFERENCE, TWIN
from hora.recipes.stepping import StepMaker, make_train_step

_LOOPBACK: Final = "127.0.0.1"


def strategy_of(variant: str) -> str:
    """Of `DistributedOptimizer`, where the variant has one."""
    return variant if variant in ("deferred", "sharded") else "overlap"


@contextmanager
def step_maker(variant: str, num_gpus: int) -> Iterator[StepMaker]:
    """What makes the steps of `variant`, inside the `with` block. Collective."""
    if variant in (REFERENCE, "per-parameter"):
        yield _plain(SumStep)
    elif variant == TWIN:
        yield _plain(TwinStep)
    elif variant == "data_parallel":
        yield _plain(partial(DataParallelStep, num_gpus=num_gpus))
    elif variant == "ddp":
        yield _plain(DdpStep)
    elif variant == "horovod":
        with _horovod() as hvd:
            yield _plain(partial(HorovodStep, hvd=hvd))
    else:
        yield make_train_step


def _plain(maker: PlainMaker) -> StepMaker:
    def make(*words: Any, strategy: str, capture: bool, **options: Any) -> Any:  # noqa: ARG001
        return maker(*words, **options)

    return make


@contextmanager
def _horovod() -> Iterator[Any]:
    """`horovod.torch` with the ranks of this session on one host, which meet at a server of Horovod's in rank 0, as those of `horovodrun` do."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    here, server, port = session(), None, 0
    if here.rank == 0:
        server = RendezvousServer(0)
        port = server.start()
        server.init(get_host_assignments(parse_hosts(f"localhost:{here.world_size}"), here.world_size))
    places = {
        "RANK": here.rank,
        "LOCAL_RANK": here.rank,
        "CROSS_RANK": 0,
        "SIZE": here.world_size,
        "LOCAL_SIZE": here.world_size,
        "CROSS_SIZE": 1,
    }
    found = {
        "HOSTNAME": "localhost",
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_IFACE": "lo",
        "GLOO_RENDEZVOUS_ADDR": _LOOPBACK,
        "GLOO_RENDEZVOUS_PORT": broadcast_object(port),
    }
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in (places | found).items()})
    import horovod.torch as hvd

    hvd.init()
    try:
        yield hvd
    finally:
        hvd.shutdown()
        if server is not None:
            server.stop()
