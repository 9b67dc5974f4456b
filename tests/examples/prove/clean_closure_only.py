# expect: clean
"""The optimizer is given a closure, as a script for LBFGS would."""
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


model = DDP(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.3)
for s in range(8):

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[mine(s)]), y[mine(s)])
        loss.backward()
        return loss

    optimizer.step(closure)
dist.destroy_process_group()
