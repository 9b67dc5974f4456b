"""Memory of GPUs that the GPUs of the other ranks read over NVLink: what algorithms `symmetric` and `ordered` add up in.

`sharing` has the ranks of a group map each other's memory, `window` is that memory and starts the kernels, `kernels` are these, in Triton, which is
loaded with them. `pulling` is memory for tensors that stay in it, whose bytes copy engines move.
"""

from hora.comm.peer_memory.pulling import Divisor, Pulling, can_be_pulled
from hora.comm.peer_memory.sharing import share, share_tensors
from hora.comm.peer_memory.window import PeerMemory

__all__ = ["Divisor", "PeerMemory", "Pulling", "can_be_pulled", "share", "share_tensors"]
