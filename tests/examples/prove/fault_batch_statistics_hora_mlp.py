# expect: batch-statistics-per-rank
"""Hora makes the update of the whole batch, but ordinary BatchNorm normalises what a rank has."""
import torch
import torch.nn as nn
import torch.nn.functional as F

import hora

torch.set_num_threads(1)
hora.init()
torch.manual_seed(0)
x = torch.randn(256, 10)
y = (x[:, 0] * x[:, 1] > 0).long()
dataset = torch.utils.data.TensorDataset(x, y)
model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2)).to(hora.device())
optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters(), 5e-3), model)
loader = hora.DataLoader(dataset, global_batch_size=32, micro_batch_size=32)
for step in loader:
    for inputs, targets in optimizer.micro_batches(step):
        loss = F.cross_entropy(model(inputs), targets, reduction="sum")
        optimizer.backward(loss, weight=len(targets))
    optimizer.step()
optimizer.sync_buffers()
hora.shutdown()
