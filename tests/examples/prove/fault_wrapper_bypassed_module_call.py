# expect: wrapper-bypassed
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))


def make_data():
    g = torch.Generator().manual_seed(99)
    x = torch.randn(192, 12, generator=g)
    return TensorDataset(x, torch.sin(x).sum(1, keepdim=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    ddp = DistributedDataParallel(build(3))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    dataset = make_data()
    sampler = DistributedSampler(dataset, seed=5)
    loader = DataLoader(dataset, args.batch, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            prediction = ddp.module(x)  # .module: "so that I can read the hidden states"
            loss = nn.functional.mse_loss(prediction, y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
