"""A plain DistributedDataParallel script with a fault that is easy to miss.

`hora prove --ranks 1,2 examples/ddp_images.py --batch-size '{32/ranks}'` finds it.

It trains to a good accuracy on any number of ranks; yet two ranks do not train the model that one rank trains.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
parser.add_argument("--epochs", type=int, default=3)
arguments = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
targets = torch.randint(4, (512,))
images = torch.randn(512, 1, 8, 8)
images[torch.arange(512), 0, 2 * targets, 2 * targets] += 4.0  # a bright spot that a small network can find
dataset = TensorDataset(images, targets)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, arguments.batch_size, sampler=sampler)
network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)

for epoch in range(arguments.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
dist.destroy_process_group()
