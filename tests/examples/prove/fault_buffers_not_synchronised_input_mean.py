# expect: buffers-not-synchronised
"""Keeps a running mean of the inputs for later deployment; training never reads it."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class WithInputStatistics(nn.Module):
    def __init__(self, features=11, classes=3):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, classes))
        self.register_buffer("input_mean", torch.zeros(features))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.input_mean.lerp_(x.mean(0), 0.1)
                self.seen += 1
        return self.net(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(31)
    x = torch.randn(256, 11) + 0.5
    data = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(data)
    model = DDP(WithInputStatistics(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler.set_epoch(0)
    for x, y in DataLoader(data, args.batch_size, sampler=sampler):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(dist.get_rank(), model.module.input_mean[:3])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
