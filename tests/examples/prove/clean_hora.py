# expect: clean
"""Hora with micro-batches, clipping and a ragged end (115 samples: the last step has 19)."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

import hora


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    hora.init()
    torch.manual_seed(0)
    x = torch.randn(115, 8)
    dataset = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)).to(hora.device())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    optimizer = hora.DistributedOptimizer(optimizer, model, clip_norm=0.5)
    loader = hora.DataLoader(dataset, global_batch_size=32, micro_batch_size=args.micro_batch_size)
    for _ in range(args.epochs):
        for step in loader:
            for inputs, targets in optimizer.micro_batches(step):
                loss_sum = F.cross_entropy(model(inputs), targets, reduction="sum")
                optimizer.backward(loss_sum, weight=len(targets))
            optimizer.step()
            scheduler.step()
    hora.shutdown()


if __name__ == "__main__":
    main()
