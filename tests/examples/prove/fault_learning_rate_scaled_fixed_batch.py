# expect: learning-rate-scaled
"""Fine tuning recipe that follows the linear scaling rule although its batch is the global one."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BASE_LR = 0.02
GLOBAL_BATCH = 32


def setup():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)


def get_loader():
    x = torch.randn(160, 3, 8, 8)
    y = (x.mean((1, 2, 3)) > 0).long()
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    return DataLoader(data, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler), sampler


def main():
    setup()
    loader, sampler = get_loader()
    model = DDP(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2))
    )
    # scale the learning rate by the number of workers (Goyal et al. 2017)
    optimizer = torch.optim.SGD(model.parameters(), lr=BASE_LR * dist.get_world_size(), momentum=0.9, nesterov=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    print(f"rank {dist.get_rank()} done, loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
