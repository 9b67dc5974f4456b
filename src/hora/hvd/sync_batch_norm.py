"""`hvd.SyncBatchNorm`: Hora's, on CPU and GPU, once the world is initialised."""

from hora.sync.batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
