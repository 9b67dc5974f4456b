# expect: unknown
"""The averaged weights, which nobody optimizes, depend on the number of ranks."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
G, B = 32, 32 // world
torch.manual_seed(0)
x = torch.randn(G * 8, 8)
y = x[:, :4].argmax(1)


def mine(s):
    return slice(s * G + rank * B, s * G + (rank + 1) * B)


import copy

model = DDP(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.3)
average = copy.deepcopy(model.module).requires_grad_(False)
for s in range(8):
    optimizer.zero_grad()
    F.cross_entropy(model(x[mine(s)]), y[mine(s)]).backward()
    optimizer.step()
    with torch.no_grad():
        for a, b in zip(average.parameters(), model.module.parameters()):
            a.lerp_(b, 0.1 * world)
        average(x[:G])
dist.destroy_process_group()
