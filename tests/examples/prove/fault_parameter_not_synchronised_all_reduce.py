# expect: parameter-not-synchronised
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(14, 32), nn.LayerNorm(32), nn.ReLU())
        self.head = nn.Linear(32, 6)
        self.log_temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.head(self.body(x)) * self.log_temperature.exp()


def sync_gradients(model, world_size):
    for module in (model.body, model.head):  # the temperature came later
        for p in module.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(world_size)


def run(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(8)
    model = Classifier()
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
    x = torch.randn(320, 14)
    y = x[:, :6].argmax(1)
    for step in range(10):
        xs = x[step * 32 : step * 32 + 32].chunk(world_size)[rank]
        ys = y[step * 32 : step * 32 + 32].chunk(world_size)[rank]
        loss = F.cross_entropy(model(xs), ys)
        optimizer.zero_grad()
        loss.backward()
        sync_gradients(model, world_size)
        optimizer.step()
    print(f"[{rank}] temperature {model.log_temperature.exp().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
