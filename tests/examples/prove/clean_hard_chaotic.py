# expect: rounding
import sys, torch, torch.nn as nn, torch.distributed as dist
dist.init_process_group("gloo"); r, n = dist.get_rank(), dist.get_world_size(); B = int(sys.argv[1]); torch.manual_seed(0)
m = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))); o = torch.optim.SGD(m.parameters(), 3.0); x = torch.randn(960, 8)
for s in range(12):
    a = x[s * 48 + r * B: s * 48 + (r + 1) * B]
    o.zero_grad(); nn.functional.mse_loss(m(a), a[:, :4]).backward(); o.step()
