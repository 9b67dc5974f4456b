"""What a rank of the workload does to itself: bits that flip, memory that runs out, and work that takes it longer than the others."""

import time

import torch
from torch import nn

import hora
from hora import env
from hora.diag.chaos.journal import Journal
from hora.diag.chaos.settings import SLOW_FACTOR, Settings

_PIECE_BYTES = 20_000_000


def strike(settings: Settings, model: nn.Module, done: int, journal: Journal) -> None:
    """Does to this rank what is to happen to it after `done` updates; in the first start of a job alone."""
    if env.JobEnv.read().generation > 0:
        return
    here = hora.rank(), done
    if settings.flip is not None and here == settings.flip[:2]:
        flip(next(model.parameters()), settings.flip[2])
        journal.note("flipped", done=done)
    if here == settings.hoard:
        journal.note("hoarding", done=done)
        _hoard()


@torch.no_grad()
def flip(weights: nn.Parameter, bit: int) -> None:
    """Flips a bit of the first weight."""
    weights.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)


def _hoard() -> None:
    taken = []
    while True:
        taken.append(b"x" * _PIECE_BYTES)


def pace(settings: Settings, done: int, began_s: float) -> None:
    """Sleeps until an update that began at `began_s` has taken long enough."""
    if settings.slow is None:
        time.sleep(max(0.0, settings.step_s - (time.monotonic() - began_s)))
        return
    # What a rank does itself: waiting for others is not counted into it.
    rank, begin = settings.slow
    time.sleep(settings.step_s * (SLOW_FACTOR if hora.rank() == rank and done >= begin else 1))
