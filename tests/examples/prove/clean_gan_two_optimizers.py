# expect: clean
"""A GAN with two DDP models and two optimizers; the noise of a step is drawn by all ranks alike and shared out."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=32)
opt = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(999)
netG = DDP(nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2)))
netD = DDP(nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1)))
optimizerD = torch.optim.SGD(netD.parameters(), lr=0.05)
optimizerG = torch.optim.SGD(netG.parameters(), lr=0.05, momentum=0.5)
criterion = nn.BCEWithLogitsLoss()
angles = torch.rand(32 * 6) * 6.2832
circle = torch.stack([angles.cos(), angles.sin()], 1)
generator = torch.Generator().manual_seed(1)

for step in range(6):
    mine = slice(rank * opt.batchSize, (rank + 1) * opt.batchSize)
    real = circle[step * 32 : step * 32 + 32][mine]
    noise = torch.randn(opt.batchSize * world, 4, generator=generator)[mine]
    # (1) discriminator
    netD.zero_grad()
    fake = netG(noise)
    both = netD(torch.cat([real, fake.detach()]))
    labels = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)])
    errD = criterion(both, labels)
    errD.backward()
    optimizerD.step()
    # (2) generator; the discriminator only passes gradients on
    netG.zero_grad()
    for p in netD.parameters():
        p.requires_grad_(False)
    errG = criterion(netD.module(fake), torch.ones(len(fake), 1))
    errG.backward()
    for p in netD.parameters():
        p.requires_grad_(True)
    optimizerG.step()
    print(f"[{step}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f}")
dist.destroy_process_group()
