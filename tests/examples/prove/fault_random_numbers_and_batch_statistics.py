# expect: random-numbers-per-rank, batch-statistics-per-rank
import sys, torch, torch.nn as nn, torch.distributed as dist
dist.init_process_group("gloo"); r, n = dist.get_rank(), dist.get_world_size(); B = int(sys.argv[1]); torch.manual_seed(0)
m = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)))
o = torch.optim.SGD(m.parameters(), 0.1); x = torch.randn(480, 8)
for s in range(10):
    a = x[s * 48 + r * B: s * 48 + (r + 1) * B]
    o.zero_grad(); nn.functional.mse_loss(m(a)[:, 0], a.sum(1)).backward(); o.step()
