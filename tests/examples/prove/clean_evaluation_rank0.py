# expect: clean
"""Rank 0 evaluates the bare module while the others wait. Perplexity of a small LSTM."""
import os

import torch
import torch.distributed as dist
from torch import nn

WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
TEXT = "a rank, a plan, a canal: the ranks go round and round, the gradients come down, the ranks go up again. " * 5


class Model(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.encoder = nn.Embedding(vocabulary, 20)
        self.rnn = nn.LSTM(20, 20, batch_first=True)
        self.decoder = nn.Linear(20, vocabulary)

    def forward(self, x):
        return self.decoder(self.drop(self.rnn(self.encoder(x))[0]))


def evaluate(model, windows):
    model.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(windows[:, :-1]).transpose(1, 2), windows[:, 1:])
    model.train()
    return loss.exp()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(50)
    letters = sorted(set(TEXT))
    windows = torch.tensor([letters.index(c) for c in TEXT]).unfold(0, 15, 1)
    train, valid = windows[: 32 * 9], windows[-50:]
    ddp = nn.parallel.DistributedDataParallel(Model(len(letters)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=2.0)
    order = torch.randperm(len(train))
    for step, batch in enumerate(order.split(32)):
        mine = train[batch.chunk(WORLD)[RANK]]
        loss = nn.functional.cross_entropy(ddp(mine[:, :-1]).transpose(1, 2), mine[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 2:
            if RANK == 0:
                print(f"step {step} perplexity {evaluate(ddp.module, valid):.3f}")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
