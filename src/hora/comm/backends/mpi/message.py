"""A tensor on its way from one rank to another."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from hora.comm.backends.mpi.library import Library
from hora.comm.backends.python_group import flatten, put_back
from hora.comm.backends.queued import Failed
from hora.comm.torch_private import PythonWork


class Message(PythonWork):  # type: ignore[misc]
    """The handle of one message; MPI moves it whenever this process calls MPI.

    Args:
        library: MPI.
        post: makes the nonblocking call with the bytes of the tensor.
        tensor: what is sent, or is to be filled.
        receives: whether it is to be filled.
        what: the call, for people.
        timeout_s: how long `wait` waits.
        ranks: world ranks of the group.
    """

    def __init__(
        self, library: Library, post: Callable[[Any], Any], tensor: Tensor, receives: bool, what: str, timeout_s: float, ranks: list[int]
    ):
        super().__init__()
        self._library, self._tensor, self._receives, self._what = library, tensor, receives, what
        self._timeout_s, self._ranks = timeout_s, ranks
        self._flat = flatten(tensor, "mpi")
        self._status = library.mpi.Status()
        self._done = False
        self._error: BaseException | None = None
        with library.lock:
            self._request = post(bytes_of(self._flat))

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._done:
            given_s = timeout.total_seconds() if timeout else 0.0
            timeout_s = given_s if given_s > 0 else self._timeout_s
            try:
                self._end(self._library.complete(self._request, self._what, timeout_s, self._flat.nbytes, self._ranks))
            except Failed as error:
                self._done, self._error = True, error
        if self._error is not None:
            raise self._error
        return True

    @override
    def is_completed(self) -> bool:
        if not self._done:
            try:
                if self._library.test(self._request, self._what, self._status):
                    self._end(self._status)
            except Failed as error:
                self._done, self._error = True, error
        return self._done

    @override
    def is_success(self) -> bool:
        return self._done and self._error is None

    @override
    def exception(self) -> BaseException | None:
        return self._error

    @override
    def result(self) -> list[Tensor]:
        return [self._tensor]

    def _source_rank(self) -> int:
        return int(self._status.Get_source()) if self._receives else -1

    source_rank = _source_rank

    @override
    def get_future(self) -> Future[Any]:
        self.wait()
        future: Future[Any] = Future()
        future.set_result([self._tensor])
        return future

    def _end(self, status: Any) -> None:
        self._done, self._status = True, status
        if not self._receives:
            return
        size = status.Get_count(self._library.mpi.BYTE)
        if size != self._flat.nbytes:
            self._error = RuntimeError(f"{self._what} takes {self._flat.nbytes} bytes, but {size} came: give a tensor like the one sent")
        else:
            put_back(self._tensor, self._flat)


class FromAnybody:
    """A receive from whoever sends first, to be tested like a request of MPI's.

    MPI has one, but MPICH 5.0.2 never ends it across nodes if the message was there before. A probe finds the message either way.
    """

    def __init__(self, mpi: Any, comm: Any, data: Any, tag: int):
        self._mpi, self._comm, self._data, self._tag = mpi, comm, data, tag
        self._request: Any = None

    def Test(self, status: Any) -> bool:  # noqa: N802 (as MPI calls it)
        """Whether a message has come and is here as a whole."""
        if self._request is None:
            message = self._comm.Improbe(self._mpi.ANY_SOURCE, self._tag)
            if message is None:
                return False
            self._request = message.Irecv([self._data, self._mpi.BYTE])
        return bool(self._request.Test(status))


def bytes_of(flat: Tensor) -> Any:
    """The memory of a contiguous tensor on the CPU, for MPI."""
    return flat.view(torch.uint8).numpy() if flat.numel() else bytearray()
