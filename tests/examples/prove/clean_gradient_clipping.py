# expect: clean
"""Averages by hand and clips after that, so that all ranks clip alike."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=world)
torch.manual_seed(1)
model = nn.ModuleDict({"rnn": nn.RNN(5, 24, batch_first=True), "out": nn.Linear(24, 1)})
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
series = torch.randn(32 * 8, 12, 5)
totals = series.sum((1, 2), keepdim=False).unsqueeze(1)
for step in range(8):
    rows = slice(step * 32 + rank, (step + 1) * 32, world)
    hidden, _ = model["rnn"](series[rows])
    loss = nn.functional.mse_loss(model["out"](hidden[:, -1]), totals[rows])
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(world)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.25)
    optimizer.step()
    print(f"rank {rank} step {step} norm {norm:.4f} local loss {loss.item():.4f}")
dist.destroy_process_group()
