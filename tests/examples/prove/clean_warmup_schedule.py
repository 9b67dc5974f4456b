# expect: clean
"""Warm-up, cosine, and a log line that multiplies the rate by the number of ranks without using it."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

cfg = dict(max_lr=0.5, min_lr=0.05, warmup=4, steps=12, global_batch=32)


def get_lr(step):
    if step < cfg["warmup"]:
        return cfg["max_lr"] * (step + 1) / cfg["warmup"]
    ratio = (step - cfg["warmup"]) / (cfg["steps"] - cfg["warmup"])
    return cfg["min_lr"] + 0.5 * (1 + math.cos(math.pi * ratio)) * (cfg["max_lr"] - cfg["min_lr"])


class Trainer:
    def __init__(self):
        self.world = dist.get_world_size()
        torch.manual_seed(0)
        self.model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 3)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9)
        x = torch.randn(cfg["steps"] * cfg["global_batch"], 12)
        data = TensorDataset(x, x[:, :3].argmax(1))
        self.loader = DataLoader(data, cfg["global_batch"] // self.world, sampler=DistributedSampler(data, shuffle=False))

    def train(self):
        for step, (x, y) in enumerate(self.loader):
            lr = get_lr(step)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            if dist.get_rank() == 0:
                print(f"step {step} lr {lr:.4f} lr*ranks {lr * self.world:.4f} loss {loss.item():.4f}")


torch.set_num_threads(1)
dist.init_process_group("gloo")
Trainer().train()
dist.destroy_process_group()
