# expect: gradients-off-by-factor
"""DDP averages already; the loss is divided by the number of ranks on top. Adam hides most of it."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(6)
    model = DDP(nn.Sequential(nn.Linear(8, 24), Block(24), Block(24), nn.Linear(24, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    x = torch.randn(288, 8)
    y = (x @ torch.randn(8, 4)).argmax(1)
    dataset = torch.utils.data.TensorDataset(x, y)
    sampler = torch.utils.data.DistributedSampler(dataset, shuffle=False)
    for x, y in torch.utils.data.DataLoader(dataset, args.micro_batch, sampler=sampler):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        (loss / world).backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
    print("done", dist.get_rank())
    dist.destroy_process_group()


main()
