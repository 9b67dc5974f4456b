# expect: gradients-off-by-factor
"""More ranks, fewer micro-batches (nanoGPT's rule), but the losses of the micro-batches are not divided by their number."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

batch_size = 8
gradient_accumulation_steps = 4
max_iters = 7
learning_rate = 0.3

dist.init_process_group("gloo")
torch.set_num_threads(1)
ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert gradient_accumulation_steps % ddp_world_size == 0
gradient_accumulation_steps //= ddp_world_size

text = "it was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness " * 3
stoi = {c: i for i, c in enumerate(sorted(set(text)))}
tokens = torch.tensor([stoi[c] for c in text])
generator = torch.Generator().manual_seed(1337)
starts = torch.randint(len(tokens) - 9, (max_iters, 32), generator=generator)


def get_batch(iteration, micro_step):
    block = micro_step * ddp_world_size + ddp_rank
    ix = starts[iteration, block * batch_size : (block + 1) * batch_size]
    return torch.stack([tokens[i : i + 8] for i in ix]), torch.stack([tokens[i + 8] for i in ix])


class Bengio(nn.Module):
    def __init__(self, vocab, width=12):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.fc = nn.Linear(8 * width, 64)
        self.out = nn.Linear(64, vocab)

    def forward(self, idx, targets):
        logits = self.out(torch.tanh(self.fc(self.wte(idx).flatten(1))))
        return logits, F.cross_entropy(logits, targets)


torch.manual_seed(1337)
model = DDP(Bengio(len(stoi)))
optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
for iteration in range(max_iters):
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        logits, loss = model(*get_batch(iteration, micro_step))
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if ddp_rank == 0:
        print(f"iter {iteration}: loss {loss.item():.4f}")
dist.destroy_process_group()
