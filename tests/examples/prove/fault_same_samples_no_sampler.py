# expect: same-samples-on-all-ranks
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(100)
features = torch.randn(400, 12)
labels = (features.sum(1) > 0).float()
train_set = torch.utils.data.TensorDataset(features, labels)
train_loader = torch.utils.data.DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
model = DDP(nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 1), nn.Flatten(0)))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step, (x, y) in enumerate(train_loader):
    loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 9:
        break
dist.destroy_process_group()
