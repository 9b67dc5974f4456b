# expect: clean
"""One batch is looked at before training; set_epoch is called as it should be."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
G, B = 32, 32 // world
torch.manual_seed(0)
x = torch.randn(G * 8, 8)
y = x[:, :4].argmax(1)


def mine(s):
    return slice(s * G + rank * B, s * G + (rank + 1) * B)


data = torch.utils.data.TensorDataset(x, y)
sampler = torch.utils.data.DistributedSampler(data, seed=3)
loader = torch.utils.data.DataLoader(data, B, sampler=sampler)
print(next(iter(loader))[0].shape)
model = DDP(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
dist.destroy_process_group()
