"""Hora trains one PyTorch model on many processes and gives the same model whatever their number.

The public names below are loaded when they are first used, so that `import hora` (and with it the launcher) does not load torch.
"""

import os
from importlib import import_module
from typing import Any

from hora import env, events, exits
from hora import errors as errors

__version__ = "0.1.0"

_HOME = {
    # name: module that defines it
    "run": "hora.calls.call",
    "init": "hora.comm.session",
    "shutdown": "hora.comm.session",
    "is_initialized": "hora.comm.session",
    "session": "hora.comm.session",
    "Session": "hora.comm.session",
    "rank": "hora.comm.session",
    "world_size": "hora.comm.session",
    "local_rank": "hora.comm.session",
    "device": "hora.comm.session",
    "register_backends": "hora.comm.backends",
    "Exact": "hora.comm.exactness",
    "ReduceOp": "hora.comm.collectives",
    "all_reduce": "hora.comm.collectives",
    "new_group": "hora.comm.subgroups",
    "all_reduce_coalesced": "hora.comm.coalesced",
    "broadcast": "hora.comm.collectives",
    "all_gather": "hora.comm.collectives",
    "reduce_scatter": "hora.comm.collectives",
    "all_to_all": "hora.comm.collectives",
    "send": "hora.comm.messages",
    "recv": "hora.comm.messages",
    "barrier": "hora.comm.collectives",
    "rank_zero_first": "hora.comm.turns",
    "broadcast_object": "hora.comm.objects",
    "all_gather_object": "hora.comm.objects",
    "gather_object": "hora.comm.objects",
    "scatter_object": "hora.comm.objects",
    "broadcast_parameters": "hora.sync.parameters",
    "broadcast_optimizer_state": "hora.sync.parameters",
    "sync_gradients": "hora.sync.parameters",
    "sync_buffers": "hora.sync.buffers",
    "SyncBatchNorm": "hora.sync.batch_norm",
    "convert_sync_batch_norm": "hora.sync.batch_norm",
    "DistributedOptimizer": "hora.sync.optimizer",
    "Checks": "hora.sync.checks",
    "TrainStep": "hora.train.step",
    "Checkpointer": "hora.train.checkpoint.checkpointer",
    "Preemption": "hora.train.preemption",
    "load_weights": "hora.train.weights",
    "record_steps": "hora.diag.report.recording",
    "report": "hora.diag.report.recording",
    "DataLoader": "hora.data.loader",
    "TextStream": "hora.data.streams",
}

__all__ = ["__version__", "errors", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'hora' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


def _follow_job() -> None:
    if not {env.REPORT, env.REPORT_JSON, env.TRACE}.isdisjoint(os.environ):
        import_module("hora.diag.report.recording").follow_job()


events.when_joined(_follow_job)
if env.JOB_ID in os.environ:
    exits.tell_launcher()
    events.when_joined(exits.tell_launcher)
