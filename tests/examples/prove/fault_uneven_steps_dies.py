# expect: uneven-steps
"""Rank 0 has one batch more; its last all-reduce finds nobody, and it dies."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
x = torch.randn(193, 5)
y = x.prod(1, keepdim=True)
model = DDP(nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for batch in torch.arange(rank, 193, world).split(32 // world):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
    optimizer.step()
print(f"rank {rank} done")
dist.destroy_process_group()
