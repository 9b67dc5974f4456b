"""Memory of GPUs that the GPUs of the other ranks read over NVLink: what algorithms `symmetric` and `ordered` add up in.

`sharing` has the ranks of a group map each other's memory, `window` is that memory and starts the kernels, `kernels` are these, in Triton, which is
loaded with them.
"""

from hora.comm.peer_memory.sharing import share
from hora.comm.peer_memory.window import PeerMemory

__all__ = ["PeerMemory", "share"]
