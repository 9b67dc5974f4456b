# expect: random-numbers-per-rank
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(20, 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc3 = nn.Linear(64, 5)

    def forward(self, x):
        x = F.dropout(F.relu(self.fc1(x)), 0.2, self.training)
        x = F.dropout(F.relu(self.fc2(x)), 0.2, self.training)
        return self.fc3(x)


def main(rank, world_size, batch_size=32, steps=10):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DDP(Net())
    inputs = torch.randn(steps * batch_size, 20)
    targets = inputs[:, :5].argmax(1)
    torch.manual_seed(1000 + rank)  # different masks on the ranks, as it should be
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for step in range(steps):
        batch = slice(step * batch_size + rank, (step + 1) * batch_size, world_size)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[batch]), targets[batch])
        loss.backward()
        optimizer.step()
    print(f"rank {rank}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
