"""What tests of `hora.hvd` share."""

from collections.abc import Iterator
from contextlib import contextmanager

import hora.hvd as hvd


@contextmanager
def horovod(**how: object) -> Iterator[tuple[int, int]]:
    """Rank and size of a world that ends with the block."""
    hvd.init(**how)
    try:
        yield hvd.rank(), hvd.size()
    finally:
        hvd.shutdown()
