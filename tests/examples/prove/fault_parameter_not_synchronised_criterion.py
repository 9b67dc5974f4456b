# expect: parameter-not-synchronised
"""The loss has weights of its own (Kendall's task uncertainties) and nobody wraps a loss."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
        self.regress = nn.Linear(32, 1)
        self.classify = nn.Linear(32, 3)

    def forward(self, x):
        h = self.trunk(x)
        return self.regress(h).squeeze(1), self.classify(h)


class UncertaintyLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, outputs, value, label):
        losses = torch.stack(
            [nn.functional.mse_loss(outputs[0], value), nn.functional.cross_entropy(outputs[1], label)]
        )
        return (losses * torch.exp(-self.log_variance) + self.log_variance).sum()


dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(21)
x = torch.randn(256, 10)
data = TensorDataset(x, x.sum(1), x[:, :3].argmax(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32 // dist.get_world_size(), sampler=sampler)
model = DDP(TwoTasks())
criterion = UncertaintyLoss()
optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.05)
sampler.set_epoch(0)
for x, value, label in loader:
    loss = criterion(model(x), value, label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(dist.get_rank(), criterion.log_variance.tolist())
dist.destroy_process_group()
