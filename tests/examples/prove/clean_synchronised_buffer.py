# expect: clean
"""A running mean of the inputs again, this time averaged over the ranks and used to normalise."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class InputNorm(nn.Module):
    def __init__(self, features, momentum=0.2):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, x):
        if self.training:
            mean = x.detach().mean(0)
            dist.all_reduce(mean)
            self.mean.lerp_(mean / dist.get_world_size(), self.momentum)
        return x - self.mean


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(InputNorm(8), nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(256, 8) + 2
y = x.std(1, keepdim=True)
for batch in torch.arange(256).split(32):
    mine = batch[rank::world]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
    optimizer.step()
dist.destroy_process_group()
