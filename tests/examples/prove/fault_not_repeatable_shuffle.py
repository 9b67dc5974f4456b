# expect: not-repeatable
"""The model is seeded; the order of the samples comes from Python's random module, which is not (rank 0 tells the others)."""
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def epoch_order(size):
    order = list(range(size))
    random.shuffle(order)
    box = [order]
    dist.broadcast_object_list(box, src=0)
    return torch.tensor(box[0])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(128, 8)
    y = x[:, :2].sum(1, keepdim=True)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for batch in epoch_order(len(x)).split(32):
            mine = batch.chunk(world)[rank]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
            optimizer.step()
    dist.destroy_process_group()


main()
