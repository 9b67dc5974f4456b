# expect: clean
"""Fine tuning: the body is frozen with its BatchNorm in evaluation mode, only the head learns."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
        self.head = nn.Linear(8 * 16, 4)
        for p in self.body.parameters():
            p.requires_grad = False

    def train(self, mode=True):
        super().train(mode)
        self.body.eval()
        return self

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(14)
    net = Net().train()
    net.body[1].running_mean.normal_()
    model = DDP(net)
    x = torch.randn(256, 1, 8, 8)
    y = x.view(256, 4, 16).sum(2).argmax(1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    sampler.set_epoch(0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=1e-3)
    for x, y in DataLoader(data, args.batch_size, sampler=sampler):
        model.train()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()


main()
