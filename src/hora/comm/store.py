"""PyTorch's view of the rendezvous: a `torch.distributed.Store` whose keys live in Hora's own authenticated server.

PyTorch calls it from C++, from threads of its own too (the watchdogs of NCCL), and expects a `RuntimeError` of its own kind where a wait
ends or the server is gone. Everything that talks is in `rendezvous.Client`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from hora.comm.torch_private import Store
from hora.rendezvous.client import Client


class RendezvousStore(Store):
    """A store over `client`.

    Must be referenced from Python for as long as process groups use it: PyTorch keeps the C++ half alone alive. Thread-safe.

    Args:
        client: its connection to the job's server; stays the caller's to close, after the groups that use this store are destroyed.
        timeout_s: how long `get` and `wait` wait, until `set_timeout` says otherwise.
    """

    timeout: timedelta  # PyTorch's property, which its stubs leave out

    def __init__(self, client: Client, *, timeout_s: float = 300.0) -> None:
        super().__init__()
        self._client = client
        self._clones: list[RendezvousStore] = []
        self.set_timeout(timedelta(seconds=timeout_s))

    def clone(self) -> "RendezvousStore":
        """Another store over the same client, with a timeout of its own; lives as long as this one (C++ alone would not keep it)."""
        copy = RendezvousStore(self._client, timeout_s=self._timeout_s())
        self._clones.append(copy)
        return copy

    def set(self, key: str, value: str | bytes) -> None:
        """Sets `key`."""
        with _store_errors():
            self._client.set(key, _bytes(value))

    def get(self, key: str) -> bytes:
        """The value of `key`; waits until it is set."""
        with _store_errors():
            return self._client.get(key, self._timeout_s())

    def add(self, key: str, value: int) -> int:
        """Adds to the counter `key` and returns the sum."""
        with _store_errors():
            return self._client.add(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Puts `value` behind the value of `key`."""
        with _store_errors():
            self._client.append(key, _bytes(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Sets `key` to `desired_value` if it is `expected_value`; returns the value afterwards."""
        with _store_errors():
            return self._client.compare_set(key, _bytes(expected_value), _bytes(desired_value))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` are set; does not wait."""
        with _store_errors():
            return self._client.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all `keys` are set; a timeout of zero does not wait (with PyTorch's own stores it means for ever)."""
        with _store_errors():
            self._client.wait(keys, self._timeout_s() if timeout is None else timeout.total_seconds())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of `keys`; waits until all are set."""
        with _store_errors():
            return self._client.multi_get(keys, self._timeout_s())

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Sets several keys."""
        with _store_errors():
            self._client.multi_set(dict(zip(keys, map(_bytes, values), strict=True)))

    def delete_key(self, key: str) -> bool:
        """Removes `key`; whether it was there."""
        with _store_errors():
            return self._client.delete(key)

    def num_keys(self) -> int:
        """How many keys are set."""
        with _store_errors():
            return self._client.num_keys()

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` are there: yes."""
        return True

    # C++ looks for these two under other names than Python callers use.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _timeout_s(self) -> float:
        return self.timeout.total_seconds()


@contextmanager
def _store_errors() -> Iterator[None]:
    """Raises what PyTorch's own stores raise: its callers catch `RuntimeError`, and count on these two kinds."""
    try:
        yield
    except TimeoutError as error:
        raise dist.DistStoreError(str(error)) from error
    except ConnectionError as error:
        raise dist.DistNetworkError(str(error)) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
