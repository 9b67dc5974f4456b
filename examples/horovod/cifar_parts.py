"""What the three scripts beside this one share: arguments, images, and a ResNet for images of 32 x 32 (He et al. 2016, 6n + 2 layers)."""

import argparse
import itertools
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def read_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ResNet on CIFAR-10")
    parser.add_argument("--data", help="folder with data_batch_*.bin and test_batch.bin of CIFAR-10; without it images are made up")
    parser.add_argument("--images", type=int, default=2000, help="how many are made up for training; a quarter of it for testing")
    parser.add_argument("--depth", type=int, default=20, help="layers, 6n + 2")
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    parser.add_argument("--epochs", type=int, default=164)
    parser.add_argument("--train-batch", type=int, default=128, help="of each worker")
    parser.add_argument("--test-batch", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--schedule", type=int, nargs="+", default=[81, 122])
    parser.add_argument("--gamma", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--wd", type=float, default=5e-4)
    parser.add_argument("--manual-seed", type=int, default=0)
    parser.add_argument("--losses", help="file for the losses of all epochs, written by the first worker")
    args = parser.parse_args(words)
    if (args.depth - 2) % 6:
        parser.error(f"--depth must be 6n + 2, but is {args.depth}")
    return args


def loaders(args: argparse.Namespace, size: int, rank: int) -> tuple[DataLoader, DataLoader, DistributedSampler]:
    """Each worker's share of the images for training and for testing."""
    train, test = (TensorDataset(*_images(args, train=train)) for train in (True, False))
    sampler = DistributedSampler(train, num_replicas=size, rank=rank, seed=args.manual_seed)
    test_sampler = DistributedSampler(test, num_replicas=size, rank=rank, shuffle=False)
    return DataLoader(train, args.train_batch, sampler=sampler), DataLoader(test, args.test_batch, sampler=test_sampler), sampler


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shifts each image by up to four pixels, and mirrors every other."""
    padded = F.pad(images, (4, 4, 4, 4))
    shifts = torch.randint(9, (len(images), 2), generator=generator).tolist()
    moved = torch.stack([image[:, y : y + 32, x : x + 32] for image, (y, x) in zip(padded, shifts, strict=True)])
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(mirrored[:, None, None, None], moved.flip(3), moved)


def tell(args: argparse.Namespace, rank: int, rows: list[list[float]]) -> None:
    """Prints the newest row (learning rate, loss and accuracy of training and of testing); keeps all in a file, if there is to be one."""
    if rank == 0:
        rate, *numbers = rows[-1]
        print(f"Epoch[{len(rows)}/{args.epochs}]: LR: {rate:g}, " + ", ".join(f"{number:.4f}" for number in numbers), flush=True)
        if args.losses:
            Path(args.losses).write_text(json.dumps(rows))


class ResNet(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        planes = [width] * (blocks + 1) + [2 * width] * blocks + [4 * width] * blocks
        self.blocks = nn.Sequential(*(Block(before, after) for before, after in itertools.pairwise(planes)))
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = after // before
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.way_past = (
            nn.Identity() if stride == 1 else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.body(images) + self.way_past(images))


def _images(args: argparse.Namespace, *, train: bool) -> tuple[Tensor, Tensor]:
    if args.data is None:
        return _made_up(args.images if train else args.images // 4, args.manual_seed + (not train))
    paths = sorted(Path(args.data).glob("data_batch_*.bin" if train else "test_batch.bin"))
    rows = torch.from_numpy(np.concatenate([np.fromfile(path, np.uint8).reshape(-1, 3073) for path in paths]))
    pixels = rows[:, 1:].view(-1, 3, 32, 32).float() / 255
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None], rows[:, 0].long()


def _made_up(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ten coarse patterns, each image one of them with noise."""
    patterns = torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(1234))
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(10, (count,), generator=generator)
    return F.interpolate(patterns[targets], 32) + torch.randn(count, 3, 32, 32, generator=generator), targets
