# expect: wrapper-bypassed
"""A model with its own training_step, called through ddp.module as one does for methods that are not forward."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])

TEXT = (
    "the model is the same whatever the number of ranks, said the manual, and the user believed it; "
    "he trained on one, he trained on two, and the curves went apart on the second step already. "
) * 4


class CharModel(nn.Module):
    def __init__(self, vocabulary, width=32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.decoder(hidden)

    def training_step(self, batch):
        logits = self.decoder(self.lstm(self.embedding(batch[:, :-1]))[0])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Trainer:
    def __init__(self, length=16, batch_size=32 // WORLD):
        characters = sorted(set(TEXT))
        codes = torch.tensor([characters.index(c) for c in TEXT])
        self.windows = codes.unfold(0, length + 1, 1)
        self.batch_size = batch_size
        torch.manual_seed(1)
        self.model = nn.parallel.DistributedDataParallel(CharModel(len(characters)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)

    def batches(self, steps):
        generator = torch.Generator().manual_seed(2)
        order = torch.randperm(len(self.windows), generator=generator)
        for step in range(steps):
            whole = order[step * 32 : (step + 1) * 32]
            yield self.windows[whole[RANK::WORLD]]

    def fit(self, steps=9):
        self.model.train()
        for step, batch in enumerate(self.batches(steps)):
            self.optimizer.zero_grad()
            loss = self.model.module.training_step(batch)
            loss.backward()
            self.optimizer.step()
            if RANK == 0:
                print(f"{step:3d} {loss.item():.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer().fit()
    dist.destroy_process_group()
