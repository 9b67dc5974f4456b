"""What MPICH, and the MPIs that descend from it, want of whoever starts their ranks: the wire protocol PMI-1, over sockets that ranks inherit.

With it Hora's launcher starts MPI's ranks as it starts all others, without `mpiexec`: that one listens on every interface for as long as the job
lasts, to whoever comes, and reports a rank that was killed by its process alone. Here nothing listens. One node; ranks that start more ranks
(`MPI_Comm_spawn`) are refused. The protocol: Balaji et al., PMI: A Scalable Parallel Process-Management Interface for Extreme-Scale Systems
(EuroMPI 2010), and `pmi_wire` in MPICH's sources.
"""

import os
import selectors
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import util

from hora.errors import ConfigError

_LONGEST_NAME, _LONGEST_KEY, _LONGEST_VALUE = 64, 64, 1024
_RECEIVE_BYTES = 1 << 16


class ProcessManager:
    """Answers the ranks of one node, from a thread of its own. Use as a context manager.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # MPICH derives the name of its shared memory from it: jobs of one name would meet in there.
        self._name = f"hora-{os.urandom(16).hex()}"
        self._values = {"PMI_process_mapping": f"(vector,(0,1,{size}))"}
        self._waiting: list[socket.socket] = []
        self._heard: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        pairs = [socket.socketpair() for _ in range(size)]
        self._theirs = [theirs for _, theirs in pairs]
        for ours, _ in pairs:
            self._heard[ours] = b""
            self._selector.register(ours, selectors.EVENT_READ)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="hora-pmi", daemon=True)

    def __enter__(self) -> "ProcessManager":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._wake.send(b"x")
        self._thread.join()
        for sock in (*self._theirs, *self._heard, self._wake, self._woken):
            sock.close()
        self._selector.close()

    def descriptor(self, rank: int) -> int:
        """What the process of `rank` must inherit."""
        return self._theirs[rank].fileno()

    def environ(self, rank: int) -> Mapping[str, str]:
        """What its environment must say."""
        return {"PMI_FD": str(self.descriptor(rank)), "PMI_RANK": str(rank), "PMI_SIZE": str(self._size)}

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    return
                assert isinstance(key.fileobj, socket.socket)
                self._hear(key.fileobj)

    def _hear(self, rank: socket.socket) -> None:
        try:
            data = rank.recv(_RECEIVE_BYTES)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(rank)
            return
        *lines, self._heard[rank] = (self._heard[rank] + data).split(b"\n")
        for line in lines:
            for listener, answer in self._answer(rank, _words(line)):
                _tell(listener, answer)

    def _answer(self, rank: socket.socket, words: Mapping[str, str]) -> list[tuple[socket.socket, str]]:
        """Who is to be told what."""
        command, key = words.get("cmd", ""), words.get("key", "")
        if command == "barrier_in":
            self._waiting.append(rank)
            if len(self._waiting) < self._size:
                return []
            waiting, self._waiting = self._waiting, []
            return [(other, "cmd=barrier_out rc=0") for other in waiting]
        if command == "put":
            self._values[key] = words.get("value", "")
        answer = {
            "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": f"cmd=maxes kvsname_max={_LONGEST_NAME} keylen_max={_LONGEST_KEY} vallen_max={_LONGEST_VALUE}",
            "get_appnum": "cmd=appnum appnum=0",
            "get_my_kvsname": f"cmd=my_kvsname kvsname={self._name}",
            "get_universe_size": f"cmd=universe_size size={self._size}",
            "put": "cmd=put_result rc=0 msg=success",
            "get": f"cmd=get_result rc=0 msg=success value={self._values[key]}"
            if key in self._values
            else "cmd=get_result rc=-1 msg=key_not_found value=unknown",
            "finalize": "cmd=finalize_ack rc=0",
            "publish_name": "cmd=publish_result rc=-1 msg=not_supported",
            "lookup_name": "cmd=lookup_result rc=-1 msg=not_supported",
            "spawn": "cmd=spawn_result rc=-1 msg=not_supported",
        }.get(command)
        return [] if answer is None else [(rank, answer)]


def require_mpi() -> None:
    """Sees that ranks will find an MPI.

    Raises:
        ConfigError: there is no mpi4py.
    """
    if util.find_spec("mpi4py") is None:
        raise ConfigError('--mpi needs mpi4py and an MPI, but there is no mpi4py here; pip install "hora[mpi]"')


def _words(line: bytes) -> dict[str, str]:
    """`cmd=put key=a value=b c` as a mapping; a value is the last word and may have spaces."""
    text = line.decode("utf-8", "replace")
    head, mark, value = text.partition(" value=")
    words = dict(word.split("=", 1) for word in head.split() if "=" in word)
    return words | ({"value": value} if mark else {})


def _tell(rank: socket.socket, answer: str) -> None:
    with suppress(OSError):  # it has ended, which the launcher sees for itself
        rank.sendall(answer.encode() + b"\n")
