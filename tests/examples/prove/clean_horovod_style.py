# expect: clean
"""Horovod-style: optimizer subclass with hooks, parameters and optimizer state broadcast, backward_passes_per_step, nested step."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)


class _DistributedOptimizer(torch.optim.Optimizer):
    def __init__(self, params, passes):
        super(self.__class__, self).__init__(params)
        self.passes = passes
        self.count, self.handles = {}, {}
        for group in self.param_groups:
            for p in group["params"]:
                p.register_post_accumulate_grad_hook(self.hook)

    def hook(self, p):
        self.count[p] = self.count.get(p, 0) + 1
        if self.count[p] == self.passes:
            self.count[p] = 0
            self.handles[p] = dist.all_reduce(p.grad, async_op=True)

    def step(self, closure=None):
        for p, handle in self.handles.items():
            handle.wait()
            p.grad.div_(dist.get_world_size())
        self.handles.clear()
        return super(self.__class__, self).step(closure)


def DistributedOptimizer(optimizer, backward_passes_per_step=1):
    cls = type(optimizer.__class__.__name__, (optimizer.__class__,), dict(_DistributedOptimizer.__dict__))
    return cls(optimizer.param_groups, backward_passes_per_step)


def metric_average(value):
    tensor = torch.tensor(value)
    dist.all_reduce(tensor)
    return tensor.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42 + rank)  # differs, and is made good by the broadcast below
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 4))
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), 2)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 1, 8, 8, generator=g)
    y = x.view(256, 4, 16).sum(2).argmax(1)
    for step in range(8):
        mine = torch.arange(step * 32, step * 32 + 32)[rank::size]
        optimizer.zero_grad()
        for part in mine.chunk(2):
            loss = F.cross_entropy(model(x[part]), y[part])
            (loss / 2).backward()
        optimizer.step()
        average = metric_average(loss.item())
        if rank == 0:
            print(f"step {step} loss {average:.4f}")
    dist.destroy_process_group()


main()
