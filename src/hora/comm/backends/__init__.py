"""The backends by name, and which of them serves a device.

A backend is one file with one class. To add one, write the file and name its class in `_BACKENDS`; the order is the order of preference.
"""

from hora.comm.backends.base import Backend
from hora.comm.backends.gloo import Gloo
from hora.comm.backends.mpi import Mpi
from hora.comm.backends.nccl import Nccl
from hora.comm.backends.shm import Shm
from hora.comm.backends.shm import register as register_shm
from hora.comm.backends.solo import Solo
from hora.errors import ConfigError

_BACKENDS: tuple[Backend, ...] = (Solo(), Nccl(), Shm(), Gloo(), Mpi())


def choose_backend(name: str | None, device_type: str | None, world_size: int) -> Backend:
    """The backend called `name`, or without a name the first one that can serve `device_type` (None: any) here.

    Raises:
        ConfigError: there is no such backend, or it cannot be used; the message lists those that can, and why the others cannot.
    """
    reasons = {backend.name: _why_not(backend, device_type, world_size) for backend in _BACKENDS}
    if name is not None and name not in reasons:
        raise ConfigError(f'unknown backend "{name}"; choose one of: {", ".join(reasons)}. {_survey(reasons)}')
    for backend in _BACKENDS:
        if name in (None, backend.name) and reasons[backend.name] is None:
            return backend
    wanted = f'backend "{name}"' if name else f"a backend for {device_type or 'any device'}"
    raise ConfigError(f"{wanted} is not available with world_size = {world_size}. {_survey(reasons)}")


def register_backends() -> None:
    """Makes torch.distributed know the backends of Hora's, for scripts that call `init_process_group("shm")` themselves."""
    register_shm()


def _why_not(backend: Backend, device_type: str | None, world_size: int) -> str | None:
    if device_type is not None and device_type not in backend.device_types:
        return f"it serves {' and '.join(backend.device_types)}, not {device_type}"
    return backend.unavailable_because(world_size)


def _survey(reasons: dict[str, str | None]) -> str:
    usable = [name for name, reason in reasons.items() if reason is None]
    refused = [f"{name} ({reason})" for name, reason in reasons.items() if reason is not None]
    return f"Available here: {', '.join(usable) or 'none'}; not available: {', '.join(refused) or 'none'}."


__all__ = ["Backend", "choose_backend", "register_backends"]
