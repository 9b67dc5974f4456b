# expect: clean
import sys, torch, torch.nn as nn, torch.distributed as dist
dist.init_process_group("gloo"); r, n = dist.get_rank(), dist.get_world_size(); B = int(sys.argv[1]); torch.manual_seed(0)
t = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).requires_grad_(False)
m = nn.parallel.DistributedDataParallel(nn.Linear(8, 4)); o = torch.optim.Adam(m.parameters(), 0.01); x = torch.randn(480, 8)
for s in range(10):
    a = x[s * 48 + r * B: s * 48 + (r + 1) * B]
    with torch.no_grad(): z = t(a).softmax(-1)
    o.zero_grad(); nn.functional.kl_div(m(a).log_softmax(-1), z, reduction="batchmean").backward(); o.step()
