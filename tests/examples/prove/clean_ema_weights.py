# expect: clean
"""Averaged weights (torch.optim.swa_utils) beside the trained ones; evaluated at the end on every rank."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(8)
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
model = DDP(net)
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
x = torch.randn(256, 8)
data = TensorDataset(x, x.pow(2).mean(1, keepdim=True))
sampler = DistributedSampler(data)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler.set_epoch(0)
for x, y in DataLoader(data, args.batch_size, sampler=sampler):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    ema.update_parameters(net)
with torch.no_grad():
    x, y = data.tensors
    print("trained", nn.functional.mse_loss(net(x), y).item(), "averaged", nn.functional.mse_loss(ema(x), y).item())
dist.destroy_process_group()
