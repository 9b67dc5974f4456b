# expect: clean
import sys, torch, torch.distributed as dist, torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
dist.init_process_group("gloo"); r, n = dist.get_rank(), dist.get_world_size(); B = int(sys.argv[1])
torch.manual_seed(0)
class M(nn.Module):
    def __init__(s):
        super().__init__(); s.e = nn.Embedding(30, 16, padding_idx=1); s.o = nn.Linear(16, 30)
    def forward(s, input_ids=None, attention_mask=None, labels=None):
        h = s.e(input_ids) * attention_mask[..., None]; logits = s.o(torch.tanh(h.cumsum(1)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return {"loss": loss, "logits": logits}
m = nn.parallel.DistributedDataParallel(M()); o = torch.optim.AdamW(m.parameters(), 1e-2)
docs = [torch.randint(2, 30, (int(torch.randint(3, 20, ())),)) for _ in range(480)]
for s in range(10):
    mine = docs[s * 48 + r * B: s * 48 + (r + 1) * B]
    x = pad_sequence(mine, True, 1); lab = pad_sequence(mine, True, -100)
    cnt = torch.tensor(float(sum(map(len, mine)))); dist.all_reduce(cnt)
    out = m(input_ids=x, attention_mask=(x != 1).long(), labels=lab)
    o.zero_grad(); (out["loss"] * n / cnt).backward(); o.step()
