"""A language model on text, as a script for Horovod: nothing in it knows of Hora.

hora run --horovod -np 2 examples/horovod/lstm.py --data text.txt
"""

import argparse
import math

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="LSTM language model with Horovod")
parser.add_argument("--data", required=True, help="a text file")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--bptt", type=int, default=16)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--base-lr", type=float, default=2e-3)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--checkpoint", help="written by the first worker")


class Model(nn.Module):
    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.lstm(self.embedding(tokens))[0])


def read(path: str, bptt: int) -> tuple[TensorDataset, int]:
    with open(path, encoding="utf-8") as file:
        words = file.read().split()
    numbers = {word: number for number, word in enumerate(sorted(set(words)))}
    tokens = torch.tensor([numbers[word] for word in words])
    rows = (len(tokens) - 1) // bptt
    inputs, targets = tokens[: rows * bptt].view(rows, bptt), tokens[1 : rows * bptt + 1].view(rows, bptt)
    return TensorDataset(inputs, targets), len(numbers)


def metric_average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


def main() -> None:
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(args.seed)
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    dataset, vocabulary = read(args.data, args.bptt)
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    model = Model(vocabulary, args.hidden).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.base_lr * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total, batches = 0.0, 0
        for inputs, targets in loader:
            optimizer.zero_grad()
            logits = model(inputs.to(device))
            loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            total, batches = total + loss.item(), batches + 1
        average = metric_average(total / batches, "average_loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch} perplexity {math.exp(average):.2f}", flush=True)
    digest = hvd.allgather(torch.stack([p.detach().double().sum().cpu() for p in model.parameters()])[None], name="digest")
    if not (digest == digest[0]).all():
        raise SystemExit("the workers' models differ")
    if hvd.rank() == 0 and args.checkpoint:
        torch.save(model.state_dict(), args.checkpoint)


if __name__ == "__main__":
    main()
