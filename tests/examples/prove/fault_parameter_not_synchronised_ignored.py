# expect: parameter-not-synchronised
"""DDP told to leave a (big) embedding alone, as in recommendation models where it is sharded; here nobody shards it."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Recommender(nn.Module):
    def __init__(self, items=200, width=16):
        super().__init__()
        self.items = nn.Embedding(items, width)
        self.top = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, left, right):
        return self.top(torch.cat([self.items(left), self.items(right)], dim=1)).squeeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    batch_size = parser.parse_args().batch_size
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Recommender()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["items.weight"])
    model = DDP(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    loss_fn = nn.BCEWithLogitsLoss()
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        pairs = torch.randint(200, (batch_size * world, 2), generator=generator)
        clicks = ((pairs[:, 0] + pairs[:, 1]) % 3 == 0).float()
        mine = slice(rank * batch_size, (rank + 1) * batch_size)
        loss = loss_fn(model(pairs[mine, 0], pairs[mine, 1]), clicks[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(step, loss.item())
    dist.destroy_process_group()


main()
