# expect: clean
"""ZeroRedundancyOptimizer: each rank keeps the optimizer state of its share of the parameters only."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
x = torch.randn(256, 10)
y = x[:, :3].argmax(1)
for batch in torch.arange(256).view(8, 32):
    mine = batch[rank::world]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
    optimizer.step()
dist.destroy_process_group()
