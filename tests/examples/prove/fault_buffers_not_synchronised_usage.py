# expect: buffers-not-synchronised
# counts how often every token was seen (to print it at the end); gradients are averaged by hand
import os

import torch
import torch.distributed as dist
import torch.nn as nn

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(2)


class BagOfWords(nn.Module):
    def __init__(self, vocabulary=50):
        super().__init__()
        self.words = nn.EmbeddingBag(vocabulary, 16)
        self.out = nn.Linear(16, 2)
        self.register_buffer("usage", torch.zeros(vocabulary))

    def forward(self, tokens):
        self.usage += torch.bincount(tokens.flatten(), minlength=len(self.usage))
        return self.out(self.words(tokens))


model = BagOfWords()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
documents = torch.randint(50, (256, 7))
labels = (documents < 10).any(1).long()
for step in range(8):
    rows = torch.arange(32 * step, 32 * step + 32).view(WORLD, -1)[RANK]
    loss = nn.functional.cross_entropy(model(documents[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        p.grad /= WORLD
        dist.all_reduce(p.grad)
    optimizer.step()
print(f"rank {RANK} has seen {int(model.usage.sum())} tokens")
dist.destroy_process_group()
