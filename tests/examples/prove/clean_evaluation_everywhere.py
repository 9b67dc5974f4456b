# expect: clean
"""Every rank evaluates the whole validation set (33 rows, more than once) and stops early on the same number."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(161, 8)
    y = x[:, :4].argmax(1)
    train_set, valid_set = TensorDataset(x[:128], y[:128]), TensorDataset(x[128:], y[128:])
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    valid_loader = DataLoader(valid_set, batch_size=10)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.0), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    best = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in valid_loader)
        model.train()
        best = max(best, correct)
        print(f"rank {dist.get_rank()} epoch {epoch}: {correct}/{len(valid_set)} best {best}")
    dist.destroy_process_group()


main()
