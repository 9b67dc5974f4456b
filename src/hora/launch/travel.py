"""Which environment variables go along to other hosts. Pure.

A host has an environment of its own. Of this machine's, what steers the job travels, by name; what names things of this machine, and what
looks like a secret, does not. `-x NAME` sends any other.
"""

import re
from collections.abc import Mapping

from hora import env

PREFIXES = (
    "HORA_", "HOROVOD_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "PYTHON", "OMP_", "MKL_", "KMP_",
    "UCX_", "FI_", "IBV_", "RDMAV_", "MLX",
)  # fmt: skip
"""Variables whose names begin so travel; the last row is about InfiniBand and its like."""

_STAY = frozenset(
    {
        env.JOB_ID, env.JOB_DIR, env.RENDEZVOUS, env.KEY_FILE, env.GENERATION, env.NODE_RANK, env.NUM_NODES, env.LAUNCHER_PID, env.MPI,
        "PYTHONSTARTUP",
    }
)  # fmt: skip
"""Of those, what belongs to another job, or to this terminal."""

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE|AUTH")


def looks_secret(name: str) -> bool:
    """Whether a variable of this name may hold a secret."""
    return _SECRET.search(name) is not None


def travelling(environ: Mapping[str, str], *, same_python: bool) -> dict[str, str]:
    """What of `environ` is sent without being named. VIRTUAL_ENV goes along where the hosts run the Python of this machine's path."""
    names = {name for name in environ if name.startswith(PREFIXES) and name not in _STAY and not looks_secret(name)}
    if same_python and "VIRTUAL_ENV" in environ:
        names.add("VIRTUAL_ENV")
    return {name: environ[name] for name in sorted(names)}
