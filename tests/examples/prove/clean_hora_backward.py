# expect: clean
"""A loop that keeps loss.backward(), under hora.DistributedOptimizer; batches of equal size taken by hand."""
import os

import torch
import torch.nn as nn


import hora

torch.set_num_threads(1)
hora.init()
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6))
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.01), model)
x = torch.randn(32 * 8, 6)
for step in range(8):
    mine = x[step * 32 : step * 32 + 32].chunk(size)[rank]
    optimizer.zero_grad()
    loss = (model(mine) - mine.flip(1)).square().mean()
    loss.backward()
    optimizer.step()
hora.shutdown()
