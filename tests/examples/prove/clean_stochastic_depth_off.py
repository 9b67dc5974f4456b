# expect: clean
"""Draws random numbers in forward, with a seed per rank, but the probability of dropping a layer is 0."""
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Encoder(nn.Module):
    def __init__(self, width=20, depth=3, layer_drop=0.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.layer_drop = layer_drop

    def forward(self, x):
        for layer in self.layers:
            keep = torch.rand(x.size(0), 1) >= self.layer_drop
            x = x + torch.relu(layer(x)) * keep
        return x.mean(1)


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(Encoder())
x = torch.randn(320, 20)
y = x.amax(1)
torch.manual_seed(100 + rank)
random.seed(100 + rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for step in range(10):
    mine = torch.arange(step * 32, step * 32 + 32).chunk(world)[rank]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
    optimizer.step()
    if random.random() < 0.3:
        print("a word from rank", rank)
dist.destroy_process_group()
