# expect: mean-of-means
"""Language model on sentences of unequal length, padded; gradient accumulation over two micro-batches; each loss is a mean over its own tokens."""
import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

PAD = 0


class LM(nn.Module):
    def __init__(self, vocabulary=40, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


def sentences(count, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.full((count, 17), PAD)
    for row in rows:
        length = int(torch.randint(3, 18, (), generator=generator))
        start = int(torch.randint(1, 40, (), generator=generator))
        row[:length] = (start + torch.arange(length) * 3) % 39 + 1
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=32, help="per rank")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(LM())
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    data = sentences(32 * args.steps, seed=11)
    sampler = torch.utils.data.DistributedSampler(data, shuffle=True, seed=3)
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        micro_batches = batch.chunk(args.accumulate)
        for index, micro in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                logits = model(micro[:, :-1])
                loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), micro[:, 1:].reshape(-1), ignore_index=PAD)
                (loss / args.accumulate).backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
