# expect: set-epoch-forgotten
"""Horovod's pytorch_mnist.py, with a home-made DistributedOptimizer; the per-epoch set_epoch was lost in a refactoring."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.data.distributed


class _DistributedOptimizer(torch.optim.Optimizer):
    def __init__(self, params):
        super(self.__class__, self).__init__(params)
        self._handles = {}
        self._hooks = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self._hooks.append(p.register_post_accumulate_grad_hook(self._launch))

    def _launch(self, p):
        p.grad.div_(dist.get_world_size())
        self._handles[p] = dist.all_reduce(p.grad, async_op=True)

    def synchronize(self):
        for handle in self._handles.values():
            handle.wait()
        self._handles.clear()

    def step(self, closure=None):
        self.synchronize()
        return super(self.__class__, self).step(closure)


def DistributedOptimizer(optimizer):
    cls = type(optimizer.__class__.__name__, (optimizer.__class__,), dict(_DistributedOptimizer.__dict__))
    return cls(optimizer.param_groups)


def broadcast_parameters(params, root_rank=0):
    for p in params.values():
        dist.broadcast(p, root_rank)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 32)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, x):
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def train(model, optimizer, loader, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % 2 == 0 and dist.get_rank() == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(loader)}]\tLoss: {loss.item():.6f}")


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(10)
    images = torch.randn(96, 16)
    labels = images[:, :4].argmax(1)
    train_dataset = torch.utils.data.TensorDataset(images, labels)
    train_sampler = torch.utils.data.distributed.DistributedSampler(
        train_dataset, num_replicas=dist.get_world_size(), rank=dist.get_rank()
    )
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=32 // dist.get_world_size(), sampler=train_sampler
    )
    model = Net()
    broadcast_parameters(model.state_dict())
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5))
    for epoch in range(1, 4):
        train(model, optimizer, train_loader, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
