# expect: uneven-steps
"""As long as all ranks have batches the gradients are averaged; what is left over is trained alone, then rank 0 is saved."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn


class Trainer:
    def __init__(self, model, batches, lr):
        self.model, self.batches = model, batches
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        count = torch.tensor(len(batches))
        dist.all_reduce(count, op=dist.ReduceOp.MIN)
        self.common_steps = int(count)

    def average(self):
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    def run(self):
        for step, (x, y) in enumerate(self.batches):
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            if step < self.common_steps:
                self.average()
            self.optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(225, 6)
    y = x[:, :3].argmax(1)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    batches = list(zip(x[mine].split(args.batch_size), y[mine].split(args.batch_size)))
    Trainer(nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)), batches, 3e-3).run()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
