"""Where ranks meet that MPI has started: rank 0 opens a store, and tells the others through MPI where, and with which key."""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass

from typing_extensions import override

from hora.comm.backends.mpi.library import Library, library
from hora.comm.deadline import Deadline
from hora.comm.interfaces import address_towards
from hora.comm.meeting import Meeting, join_store, keep_store
from hora.comm.torch_private import Store
from hora.rendezvous.address import local_address
from hora.rendezvous.key import new_key

_INVITATION_BYTES = 512


@dataclass(frozen=True)
class AtMpi(Meeting):
    """A store that rank 0 keeps: on one node a socket in a directory of its own, on several a free port of its node.

    The key is a fresh one. It goes through MPI, which is as private as the job's tensors are.
    """

    @property
    @override
    def hint(self) -> str:
        return "see in the output of mpiexec what became of them"

    @override
    def open(self, rank: int, world_size: int, deadline: Deadline, release: ExitStack) -> Store:
        mpi = library()
        mpi.require_place(rank, world_size)
        mpi.look_around(deadline.remaining_s)
        if mpi.rank != 0:
            address, key = _hear(mpi, deadline)
            return join_store(address, key, mpi.rank, deadline, release)
        key = new_key()
        store, address = keep_store(_where(mpi, release), key, deadline, release)
        _tell(mpi, address, key, deadline)
        return store


def _where(mpi: Library, release: ExitStack) -> str:
    if mpi.elsewhere is not None:
        host = address_towards(mpi.elsewhere)
        return f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
    directory = release.enter_context(tempfile.TemporaryDirectory(prefix="hora-mpi-"))  # of mode 0700
    return local_address(directory)


def _tell(mpi: Library, address: str, key: bytes, deadline: Deadline) -> None:
    invitation = bytearray(f"{key.hex()} {address}".encode().ljust(_INVITATION_BYTES))
    mpi.run(lambda: mpi.comm.Ibcast([invitation, mpi.mpi.BYTE], 0), "telling where to meet", deadline.remaining_s)


def _hear(mpi: Library, deadline: Deadline) -> tuple[str, bytes]:
    invitation = bytearray(_INVITATION_BYTES)
    mpi.run(lambda: mpi.comm.Ibcast([invitation, mpi.mpi.BYTE], 0), "hearing where to meet", deadline.remaining_s)
    key, address = invitation.decode().split()
    return address, bytes.fromhex(key)
