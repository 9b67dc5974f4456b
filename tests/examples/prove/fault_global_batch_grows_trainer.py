# expect: global-batch-grows
"""Small CNN on synthetic pictures, tutorial style."""
import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Shapes(Dataset):
    """Squares and crosses on noise."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(7)
        self.pictures = torch.randn(size, 1, 12, 12, generator=generator) * 0.3
        self.labels = torch.randint(2, (size,), generator=generator)
        for picture, label in zip(self.pictures, self.labels):
            if label:
                picture[0, 3:9, 3:9] += 1
            else:
                picture[0, 5:7] += 1
                picture[0, :, 5:7] += 1

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.pictures[index], self.labels[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 8, 3)
        self.fc = nn.Linear(8 * 4 * 4, 2)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


class Trainer:
    def __init__(self, model, train_data, optimizer, args):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.train_data = train_data
        self.optimizer = optimizer
        self.max_steps = args.max_steps
        self.steps = 0
        self.model = DDP(model)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.cross_entropy(output, targets)
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return loss.item()

    def train(self, epochs):
        for epoch in range(epochs):
            self.train_data.sampler.set_epoch(epoch)
            for source, targets in self.train_data:
                if self.steps == self.max_steps:
                    return
                loss = self._run_batch(source, targets)
            print(f"[rank {self.global_rank}] epoch {epoch} steps {self.steps} loss {loss:.4f}")


def main(args):
    init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    dataset = Shapes(256)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=DistributedSampler(dataset))
    Trainer(model, loader, optimizer, args).train(args.epochs)
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--max_steps", type=int, default=10)
    main(parser.parse_args())
