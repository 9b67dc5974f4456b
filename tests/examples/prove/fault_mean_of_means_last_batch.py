# expect: mean-of-means
# 69 samples: the last batch of an epoch has 5, which ranks cannot share equally
import os

import torch
import torch.distributed as dist
from torch import nn

rank = int(os.environ["RANK"])
world = int(os.environ["WORLD_SIZE"])


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= world


def shard(order):
    """Every rank takes every world-th sample: nothing twice, nothing lost."""
    return order[rank::world]


dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(5)
x = torch.randn(69, 8)
y = (x.pow(2).sum(1) > 8).long()
model = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
criterion = nn.CrossEntropyLoss()

for epoch in range(3):
    order = shard(torch.randperm(69, generator=torch.Generator().manual_seed(epoch)))
    for batch in order.split(32 // world):
        optimizer.zero_grad()
        loss = criterion(model(x[batch]), y[batch])
        loss.backward()
        average_gradients(model)
        optimizer.step()
    print("epoch", epoch, "rank", rank, "loss", round(loss.item(), 4))
dist.destroy_process_group()
