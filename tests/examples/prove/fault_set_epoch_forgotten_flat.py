# expect: set-epoch-forgotten
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(42)
dist.init_process_group("gloo")

inputs = torch.randn(128, 10)
targets = inputs @ torch.randn(10, 1) + 0.1 * torch.randn(128, 1)
data = TensorDataset(inputs, targets)
loader = DataLoader(data, batch_size=args.batch_size, sampler=DistributedSampler(data))

model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1)))
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for epoch in range(args.epochs):
    running = 0.0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        running += loss.item()
    print(f"epoch {epoch}: {running / len(loader):.4f}")
dist.destroy_process_group()
