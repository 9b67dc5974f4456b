# expect: clean
"""Sinusoids, a causal mask, a step counter: buffers that are the same on all ranks."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, vocabulary=12, width=16, length=8):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, vocabulary)
        angles = torch.arange(length).unsqueeze(1) / 100 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], 1))
        self.register_buffer("mask", torch.full((length, length), -math.inf).triu(1), persistent=False)
        self.register_buffer("calls", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        h = self.embed(x) + self.positions
        scores = self.query(h) @ self.key(h).transpose(1, 2) / 4 + self.mask
        return self.out(h + scores.softmax(-1) @ self.value(h))


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Attention())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
rows = torch.randint(12, (32 * 7, 9))
rows[:, 1::2] = rows[:, ::2][:, :4]
for step in range(7):
    mine = rows[step * 32 : step * 32 + 32].chunk(world)[rank]
    loss = nn.functional.cross_entropy(model(mine[:, :-1]).transpose(1, 2), mine[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
