# expect: random-numbers-per-rank, samples-differ
"""Dropout from the first step on; the evaluation after step 4 leaves out the remainder of 35 samples."""
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


model = DDP(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.3)
for s in range(8):
    optimizer.zero_grad()
    F.cross_entropy(model(x[mine(s)]), y[mine(s)]).backward()
    optimizer.step()
    if s == 3:
        model.eval()
        k = 35 // world
        with torch.no_grad():
            model(x[rank * k : (rank + 1) * k])
        model.train()
dist.destroy_process_group()
