# expect: gradients-not-synchronised
"""Accumulation under DDP where the last micro-batch is under no_sync as well (an off-by-one)."""
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(4)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
ACCUMULATION = 2
x = torch.randn(256, 10)
y = x.roll(1, dims=1)
for step in range(8):
    mine = slice(step * 32 + rank, step * 32 + 32, world)
    micro = list(zip(x[mine].chunk(ACCUMULATION), y[mine].chunk(ACCUMULATION)))
    for i, (inputs, targets) in enumerate(micro):
        synchronise = i == ACCUMULATION
        with contextlib.nullcontext() if synchronise else model.no_sync():
            loss = nn.functional.mse_loss(model(inputs), targets) / ACCUMULATION
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(rank, loss.item())
dist.destroy_process_group()
