"""How a checkpoint comes about, as its manifest tells, and whether a run may go on from it with the same bits."""

from datetime import UTC, datetime

import torch

import hora
from hora import log
from hora.comm.session import session
from hora.errors import CheckpointMismatch
from hora.launch.host import processor_name
from hora.train.checkpoint.manifest import FORMAT, CheckpointName, Manifest


def describe(name: CheckpointName, epoch: int, metric: float | None, logical_ranks: int) -> Manifest:
    """The manifest of a checkpoint that this run is about to write, without its files."""
    return Manifest(
        format=FORMAT,
        hora=hora.__version__,
        torch=torch.__version__,
        step=name.step,
        epoch=epoch,
        generation=name.generation,
        world_size=session().world_size,
        logical_ranks=logical_ranks,
        exact=str(exact) if (exact := session().exact) else None,
        device=_device_name(),
        metric=metric,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        files={},
    )


def compare_modes(manifest: Manifest) -> None:
    """Whether a run that was exact can go on with the same bits."""
    exact = session().exact
    if exact and manifest.exact not in (None, str(exact)):
        raise CheckpointMismatch(
            f"an exact run must go on as it began, with {manifest.exact}, but hora.init was called with {exact}; give it "
            f"exact=hora.Exact({manifest.exact})"
        )
    if exact and manifest.exact:
        for what, there, here in (("torch ", manifest.torch, torch.__version__), ("", manifest.device, _device_name())):
            if there != here:
                log.get_logger().warning(
                    "the checkpoint was written with %s%s and this is %s: kernels may be others, and so may the bits from here on",
                    what, there, here,
                )  # fmt: skip
    if (exact is None) != (manifest.exact is None):
        words = ("in", "outside") if manifest.exact else ("outside", "in")
        log.get_logger().warning("the checkpoint was written %s exact mode, and training goes on %s it", *words)


def _device_name() -> str:
    device = session().device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
