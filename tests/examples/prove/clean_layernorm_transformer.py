# expect: clean
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.0))
        self.heads = heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (a.view(b, t, self.heads, -1).transpose(1, 2) for a in self.qkv(self.ln1(x)).split(c, dim=2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.0)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, block_size=16, width=24):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(Block(width, 3), Block(width, 3))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        logits = self.lm_head(self.ln_f(self.blocks(x)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) if targets is not None else None
        return logits, loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--max_iters", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1337)
    text = "First Rank: Before we proceed any further, hear me speak. All: Speak, speak. " * 8
    stoi = {c: i for i, c in enumerate(sorted(set(text)))}
    codes = torch.tensor([stoi[c] for c in text])
    model = DDP(GPT(len(stoi)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for iteration in range(args.max_iters):
        starts = torch.randint(len(codes) - 17, (args.batch_size * world,))  # the same on all ranks
        starts = starts[rank * args.batch_size : (rank + 1) * args.batch_size]
        x = torch.stack([codes[i : i + 16] for i in starts])
        y = torch.stack([codes[i + 1 : i + 17] for i in starts])
        logits, loss = model(x, targets=y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"iter {iteration}: loss {loss.item():.4f}")
    dist.destroy_process_group()


main()
