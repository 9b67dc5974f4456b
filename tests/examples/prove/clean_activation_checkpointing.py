# expect: clean
"""Forward runs twice (checkpoint recomputes it in backward)."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Deep(nn.Module):
    def __init__(self, width=24, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(depth))
        self.out = nn.Linear(width, 6)

    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.out(x)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(Deep())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(32 * 8, 24)
y = x[:, :6].argmax(1)
for batch in torch.randperm(len(x)).view(-1, 32):
    mine = batch[rank::world]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
