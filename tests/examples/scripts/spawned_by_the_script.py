"""A script that starts its own ranks, as PyTorch's ImageNet example does: `--dist-url`, `mp.spawn`, a worker for each."""

import argparse

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F

import hora


def main_worker(rank: int, args: argparse.Namespace) -> None:
    hora.init(init_method=args.dist_url, rank=rank, world_size=args.world_size, device="cpu", timeout_s=60.0)
    torch.manual_seed(rank)  # ranks begin with different weights, until rank 0 hands out its own
    model = torch.nn.Linear(4, 2)
    hora.broadcast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(12, 4, generator=generator), torch.randint(2, (12,), generator=generator)
    for _ in range(5):
        optimizer.zero_grad()
        mine = slice(rank, None, args.world_size)
        F.cross_entropy(model(inputs[mine]), targets[mine]).backward()
        hora.sync_gradients(model)
        optimizer.step()
    loss = F.cross_entropy(model(inputs), targets)
    losses = hora.all_gather(loss)
    assert all(torch.equal(loss, other) for other in losses)
    if rank == 0:
        print(f"loss {loss.item():.4f} on {hora.world_size()} ranks", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dist-url", required=True)
    parser.add_argument("--world-size", type=int, default=2)
    arguments = parser.parse_args()
    mp.spawn(main_worker, nprocs=arguments.world_size, args=(arguments,))
