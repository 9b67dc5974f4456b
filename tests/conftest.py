import signal
from collections.abc import Iterator
from typing import Any

import pytest

pytest_plugins = ["hora.testing.plugin"]

# A shell that runs pytest in the background has it, and all it starts, ignore Ctrl-C; the launcher heeds that, as `nohup` asks, and its tests
# would wait for nothing.
for _signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, signal.default_int_handler if _signum is signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(scope="session")
def prove_nest(rank_pools: Any) -> Iterator[Any]:
    """Where the tests of `hora prove` have their processes forked; see `prove_kit`."""
    from prove_kit import Nest

    with Nest(rank_pools.zygote) as nest:
        yield nest
