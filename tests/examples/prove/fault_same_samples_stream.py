# expect: same-samples-on-all-ranks
"""An iterable data set of text that knows nothing of ranks; LSTM language model."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset

TEXT = """Call me a script. Some steps ago, never mind how many precisely, having little or no data in my
shard, and nothing particular to interest me on rank nought, I thought I would train about a little and see the
whole part of the corpus. It is a way I have of driving off the overfit and regulating the gradient norm. """ * 6


class Stream(IterableDataset):
    def __init__(self, text, length=12):
        self.characters = sorted(set(text))
        self.codes = torch.tensor([self.characters.index(c) for c in text])
        self.length = length

    def __iter__(self):
        for start in range(0, len(self.codes) - self.length - 1, self.length // 3):
            window = self.codes[start : start + self.length + 1]
            yield window[:-1], window[1:]


class LSTM(nn.Module):
    def __init__(self, vocabulary, width=24):
        super().__init__()
        self.encoder = nn.Embedding(vocabulary, width)
        self.rnn = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.decoder(self.rnn(self.encoder(tokens))[0])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1111)
    stream = Stream(TEXT)
    model = nn.parallel.DistributedDataParallel(LSTM(len(stream.characters)))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    for step, (x, y) in enumerate(DataLoader(stream, batch_size=32 // world)):
        if step == 6:
            break
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).transpose(1, 2), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    dist.destroy_process_group()


main()
