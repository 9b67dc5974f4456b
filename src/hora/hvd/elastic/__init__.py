"""Training that goes on after a rank is lost or ranks are added, as `horovod.torch.elastic`: from what was committed last.

Ranks that live when another dies are ended with it, and all are started anew (`hora run --max-restarts`), so a commit outlives them: see `commits`.
"""

from hora.hvd.elastic.object_state import ObjectState, State
from hora.hvd.elastic.running import run, run_fn
from hora.hvd.elastic.sampler import ElasticSampler
from hora.hvd.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run", "run_fn"]
