# expect: clean
"""The auxiliary head is used in every third step only; find_unused_parameters."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class WithAuxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
        self.main = nn.Linear(32, 3)
        self.auxiliary = nn.Linear(32, 10)
        self.retired = nn.Linear(32, 32)

    def forward(self, x, auxiliary=False):
        h = self.body(x)
        return self.main(h), self.auxiliary(h) if auxiliary else None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    batch_size = parser.parse_args().batch_size
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(WithAuxiliary(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-4)
    x = torch.randn(9 * batch_size * world, 10)
    y = x[:, :3].argmax(1)
    for step, (xs, ys) in enumerate(zip(x.split(batch_size * world), y.split(batch_size * world))):
        xs, ys = xs[rank::world], ys[rank::world]
        optimizer.zero_grad(set_to_none=True)
        logits, reconstruction = model(xs, auxiliary=step % 3 == 2)
        loss = nn.functional.cross_entropy(logits, ys)
        if reconstruction is not None:
            loss = loss + 0.1 * nn.functional.mse_loss(reconstruction, xs)
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


main()
