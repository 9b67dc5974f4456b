# expect: initialisation-differs
"""One seed for all, yet each rank's loader seed is drawn from the same stream before the model is made: the stream stands elsewhere with more ranks."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, batch_size):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(17)
        features = torch.randn(224, 9)
        self.data = TensorDataset(features, features.abs().sum(1))
        loader_seeds = [int(torch.randint(2**31, ())) for _ in range(self.world)]
        self.sampler = DistributedSampler(self.data, seed=17)
        self.loader = DataLoader(
            self.data,
            batch_size=batch_size,
            sampler=self.sampler,
            generator=torch.Generator().manual_seed(loader_seeds[self.rank]),
        )
        model = nn.Sequential(nn.Linear(9, 32), nn.ELU(), nn.Linear(32, 1), nn.Flatten(0))
        self.model = nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=1e-3)

    def fit(self):
        self.sampler.set_epoch(0)
        for batch, (x, y) in enumerate(self.loader):
            self.optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.huber_loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            if self.rank == 0:
                print(f"batch {batch} loss {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("batch_size", type=int)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Trainer(parser.parse_args().batch_size).fit()
    dist.destroy_process_group()
