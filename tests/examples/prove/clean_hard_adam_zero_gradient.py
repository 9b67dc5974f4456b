# expect: clean
"""Attention with biases under Adam: the bias of the keys has a gradient of zero but for rounding, and Adam makes full steps of it."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 20)

    def forward(self, tokens):
        return self.out(self.encoder(self.embedding(tokens)))


tokens = torch.randint(20, (256, 8))
data = TensorDataset(tokens, tokens.sort(1).values)
sampler = DistributedSampler(data)
model = DDP(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
sampler.set_epoch(0)
for x, y in DataLoader(data, args.batch_size, sampler=sampler):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x).transpose(1, 2), y).backward()
    optimizer.step()
dist.destroy_process_group()
