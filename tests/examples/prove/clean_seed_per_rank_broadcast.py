# expect: clean
"""nanoGPT's habit: seed + rank before the model is made. DDP broadcasts rank 0's, which is what one rank would have."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
seed_offset = rank
torch.manual_seed(1337 + seed_offset)
model = DDP(nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(256, 9, generator=torch.Generator().manual_seed(0))
y = (x.mean(1) > 0).long()
for step in range(8):
    start = step * 32 + rank * args.batch_size
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[start : start + args.batch_size]), y[start : start + args.batch_size]).backward()
    optimizer.step()
dist.destroy_process_group()
