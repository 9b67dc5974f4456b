"""Gradients on their way into a bucket of a GPU: copied and looked at in one pass over memory.

`kernel` does it, in Triton, which is imported when a step is first captured; `packing` knows where the gradients of a bucket go.
"""

from hora.comm.packing.packing import Packing, make_packing

__all__ = ["Packing", "make_packing"]
