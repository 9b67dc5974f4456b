# expect: initialisation-differs
import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

config = dict(seed=2024, lr=3e-3, batch_size=32, epochs=2, hidden=24)

torch.set_num_threads(1)
dist.init_process_group("gloo")
world = dist.get_world_size()

generator = torch.Generator().manual_seed(config["seed"])
inputs = torch.rand(128, 6, generator=generator)
targets = inputs.prod(1, keepdim=True) * 20

torch.manual_seed(config["seed"] * world)  # "another experiment, another seed"
net = DDP(nn.Sequential(nn.Linear(6, config["hidden"]), nn.Tanh(), nn.Linear(config["hidden"], 1)))
opt = optim.Adam(net.parameters(), lr=config["lr"], amsgrad=True)
dataset = TensorDataset(inputs, targets)
sampler = DistributedSampler(dataset, seed=config["seed"])
loader = DataLoader(dataset, batch_size=config["batch_size"] // world, sampler=sampler)

for epoch in range(config["epochs"]):
    sampler.set_epoch(epoch)
    for x, y in loader:
        opt.zero_grad()
        loss = nn.functional.smooth_l1_loss(net(x), y)
        loss.backward()
        opt.step()
if dist.get_rank() == 0:
    print("final loss", loss.item())
dist.destroy_process_group()
