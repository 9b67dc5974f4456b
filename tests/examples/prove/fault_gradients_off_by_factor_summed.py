# expect: gradients-off-by-factor
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=world_size)
torch.manual_seed(0)

data = torch.randn(320, 1, 8, 8)
target = data.mean((1, 2, 3), keepdim=False).mul(8).sigmoid().gt(0.5).long()
model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

per_rank = 32 // world_size
for step in range(10):
    start = step * 32 + rank * per_rank
    x, y = data[start : start + per_rank], target[start : start + per_rank]
    optimizer.zero_grad()
    loss = F.nll_loss(F.log_softmax(model(x), 1), y)
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
    optimizer.step()
    if rank == 0:
        print("step", step, "loss", loss.item())
dist.destroy_process_group()
