# expect: uneven-steps
"""161 rows dealt out one by one: rank 0 gets one more than the others, hence one batch more. DDP's join covers it up."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(9)
x = torch.randn(161, 8)
y = x.cumsum(1)
mine = torch.arange(rank, 161, world_size)
model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
steps = 0
with Join([model]):
    for batch in mine.split(32 // world_size):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
        steps += 1
print(f"rank {rank} made {steps} steps")
dist.destroy_process_group()
