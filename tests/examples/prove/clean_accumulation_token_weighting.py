# expect: clean
"""Sentences of unequal length, accumulation, and the right weighting: sums, divided by the tokens of the whole global batch."""
import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

PAD = -100


class LM(nn.Module):
    def __init__(self, vocabulary=40, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x.clamp(min=0)))[0])


def sentences(count):
    generator = torch.Generator().manual_seed(11)
    rows = torch.full((count, 17), PAD)
    for row in rows:
        length = int(torch.randint(3, 18, (), generator=generator))
        start = int(torch.randint(40, (), generator=generator))
        row[:length] = (start + torch.arange(length) * 3) % 40
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(LM())
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    data = sentences(256)
    sampler = torch.utils.data.DistributedSampler(data, shuffle=True, seed=3)
    for step, batch in enumerate(torch.utils.data.DataLoader(data, batch_size=args.batch_size, sampler=sampler)):
        tokens = (batch[:, 1:] != PAD).sum()
        dist.all_reduce(tokens)
        optimizer.zero_grad()
        micro_batches = batch.chunk(args.accumulate)
        for index, micro in enumerate(micro_batches):
            with contextlib.nullcontext() if index == len(micro_batches) - 1 else model.no_sync():
                logits = model(micro[:, :-1])
                loss = F.cross_entropy(logits.transpose(1, 2), micro[:, 1:], ignore_index=PAD, reduction="sum")
                (loss * world / tokens).backward()
        optimizer.step()
        print(f"rank {dist.get_rank()} step {step} its own loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
