# expect: clean
"""The optimizer itself is subclassed and averages in step(); the base class's step is never called by an instance of its own."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class HvdSGD(torch.optim.SGD):
    """Averages gradients over the workers before each step."""

    def step(self, closure=None):
        works = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    works.append((p, dist.all_reduce(p.grad, async_op=True)))
        for p, work in works:
            work.wait()
            p.grad.div_(dist.get_world_size())
        return super().step(closure)


def broadcast_parameters(model, root_rank=0):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, root_rank)


def load_data():
    g = torch.Generator().manual_seed(4)
    labels = torch.randint(4, (224,), generator=g)
    pictures = torch.randn(224, 1, 12, 12, generator=g) * 0.5
    for i, label in enumerate(labels.tolist()):
        pictures[i, 0, label * 3 : label * 3 + 3] += 1.0
    return pictures, labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + 100 * rank)
    model = nn.Sequential(nn.Conv2d(1, 6, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 4))
    broadcast_parameters(model)
    optimizer = HvdSGD(model.parameters(), lr=0.05, momentum=0.9)
    pictures, labels = load_data()
    for step in range(7):
        index = torch.arange(step * 32, step * 32 + 32)[rank::size]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pictures[index]), labels[index])
        loss.backward()
        optimizer.step()
        print(f"worker {rank} step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
