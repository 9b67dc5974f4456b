# expect: clean
import sys, torch, torch.nn as nn, hora
hora.init(); torch.manual_seed(0)
m = hora.convert_sync_batch_norm(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)))
o = hora.DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1), m)
x = torch.randn(480, 8); ds = torch.utils.data.TensorDataset(x, x.sum(1))
for step in hora.DataLoader(ds, global_batch_size=48):
    for a, b in o.micro_batches(step):
        o.backward(((m(a)[:, 0] - b) ** 2).sum(), weight=len(b))
    o.step()
m.eval()
for step in hora.DataLoader(ds, global_batch_size=50, shuffle=False):
    for a, b in step:
        m(a)
hora.shutdown()
