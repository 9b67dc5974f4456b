# expect: clean
"""word_language_model style: time-major batches, hidden state carried over, decoder tied to the encoder. Columns are shared out among the ranks."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp=24, tie_weights=True):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, ninp, 2)
        self.decoder = nn.Linear(ninp, ntoken)
        if tie_weights:
            self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output).flatten(0, 1), hidden

    def init_hidden(self, bsz):
        return torch.zeros(2, bsz, 24), torch.zeros(2, bsz, 24)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


def repackage_hidden(h):
    return tuple(v.detach() for v in h)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1111)
words = ("the cat sat on the mat and the dog sat on the cat while a bird flew over the old grey house of the man " * 60).split()
dictionary = {w: i for i, w in enumerate(sorted(set(words)))}
train_data = batchify(torch.tensor([dictionary[w] for w in words]), 32)
width = 32 // world
train_data = train_data[:, rank * width : (rank + 1) * width]
model = RNNModel(len(dictionary))
lr, bptt = 2.0, 6
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
hidden = model.init_hidden(width)
for batch, i in enumerate(range(0, 6 * bptt, bptt)):
    data, targets = train_data[i : i + bptt], train_data[i + 1 : i + 1 + bptt].flatten()
    optimizer.zero_grad()
    hidden = repackage_hidden(hidden)
    output, hidden = model(data, hidden)
    loss = nn.functional.cross_entropy(output, targets)
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    print(f"| {batch:3d} batches | loss {loss.item():5.2f}")
dist.destroy_process_group()
