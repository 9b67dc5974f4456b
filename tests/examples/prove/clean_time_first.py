# expect: clean
import sys, torch, torch.distributed as dist, torch.nn as nn
dist.init_process_group("gloo"); r, n = dist.get_rank(), dist.get_world_size(); B = int(sys.argv[1])
torch.manual_seed(0)
class M(nn.Module):
    def __init__(s):
        super().__init__(); s.e = nn.Embedding(30, 16); s.l = nn.LSTM(16, 16); s.o = nn.Linear(16, 30)
    def forward(s, x, h=None):
        y, h = s.l(s.e(x), h); return s.o(y), h
m = nn.parallel.DistributedDataParallel(M()); o = torch.optim.SGD(m.parameters(), 5.0)
data = torch.randint(30, (12 * 10 + 1, 48)); h = None
data = data[:, r * B:(r + 1) * B]
for s in range(10):
    x, y = data[s * 12:s * 12 + 12], data[s * 12 + 1:s * 12 + 13]
    o.zero_grad(); out, h = m(x, h); h = tuple(t.detach() for t in h)
    nn.functional.cross_entropy(out.reshape(-1, 30), y.reshape(-1)).backward()
    nn.utils.clip_grad_norm_(m.parameters(), 0.25); o.step()
