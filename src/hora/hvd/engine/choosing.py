"""Which links a session has."""

import torch

from hora import log
from hora.comm.collectives import ReduceOp, all_reduce
from hora.comm.deadline import Deadline
from hora.comm.records import several_hosts
from hora.comm.session import Session
from hora.comm.torch_private import PrefixStore
from hora.hvd.engine.gloo_links import GlooLinks
from hora.hvd.engine.links import Links, NoLinks
from hora.hvd.engine.unix_links import UnixLinks, connect


def make_links(session: Session, number: int) -> Links:
    """Links of all ranks.

    Collective.

    Args:
        session: the job.
        number: tells these links from others of the session; the same on all ranks.
    """
    if session.world_size == 1:
        return NoLinks()
    made = _try_unix(session, number) if several_hosts(session.records) is None else None
    able = torch.tensor([int(made is not None)], dtype=torch.int32, device=session.device)
    if int(all_reduce(able, ReduceOp.MIN).item()):
        assert made is not None
        return made
    if made is not None:
        made.close()
    return GlooLinks(session.rank, session.world_size, session.timeout_s)


def _try_unix(session: Session, number: int) -> UnixLinks | None:
    store = PrefixStore(f"hvd/{number}", session.store)
    try:
        return connect(store, session.rank, session.world_size, Deadline(session.timeout_s))
    except (OSError, AttributeError) as error:  # systems without Unix sockets, or without credentials on them
        store.set(f"failed/{session.rank}", "")
        if session.rank == 0:
            store.set("path", "")
        log.get_logger().debug("links over Gloo, not Unix sockets: %s", error)
        return None
