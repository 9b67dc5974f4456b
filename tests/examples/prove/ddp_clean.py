# expect: clean
"""A plain DistributedDataParallel script that is right: the batch of a rank is the global batch divided by the number of ranks."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

batch_size = int(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(64, 6)
dataset = TensorDataset(inputs, (inputs[:, 0] > 0).long())
sampler = DistributedSampler(dataset, shuffle=True)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(dataset, batch_size, sampler=sampler):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
