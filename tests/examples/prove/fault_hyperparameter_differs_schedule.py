# expect: hyperparameter-differs
"""The linear decay ends sooner with more ranks ("more ranks, fewer steps"), although the batch is global and the steps are as many."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

WORLD, RANK, STEPS = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), 12
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
total_steps = STEPS * 2 // WORLD
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1 - step / total_steps))
x = torch.randn(STEPS * 32, 8)
y = x.sort(1).values
for step in range(STEPS):
    rows = slice(step * 32 + RANK, step * 32 + 32, WORLD)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
    optimizer.step()
    scheduler.step()
dist.destroy_process_group()
