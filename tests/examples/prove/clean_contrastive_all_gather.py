# expect: clean
"""CLIP-like: every rank computes the loss of the whole batch from gathered embeddings; gradients flow through the gathering."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(20, 12), nn.Linear(10, 12)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        normalise = nn.functional.normalize
        return normalise(self.image(image)), normalise(self.text(text)), self.logit_scale.exp()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    size = parser.parse_args().batch_size
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(TwoTowers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    text = torch.randn(256, 10)
    image = text @ torch.randn(10, 20)
    for step in range(8):
        mine = slice(step * 32 + rank * size, step * 32 + (rank + 1) * size)
        a, b, scale = model(image[mine], text[mine])
        logits = scale * Gather.apply(a) @ Gather.apply(b).t()
        labels = torch.arange(len(logits))
        loss = (nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits.t(), labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


main()
