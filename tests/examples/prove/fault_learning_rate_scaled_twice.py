# expect: global-batch-grows, learning-rate-scaled
"""ImageNet-example style: the argument is scaled, and the schedule scales once more."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32, help="input batch size for training")
parser.add_argument("--base-lr", type=float, default=0.0125, help="learning rate for a single worker")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--seed", type=int, default=42)


def lr_lambda(step):
    # large-batch training: the rate follows the number of workers, halved after five steps
    return dist.get_world_size() * (1.0 if step < 5 else 0.5)


def main():
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    lr = args.base_lr * int(os.environ["WORLD_SIZE"])
    x = torch.randn(1024, 16)
    y = x[:, :5].argmax(dim=1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)
    sampler.set_epoch(0)
    model.train()
    for step, (data, target) in zip(range(args.steps), loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"step {step} lr {scheduler.get_last_lr()[0]:.4f} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
