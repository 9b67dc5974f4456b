"""The first program of every course on MPI: `init_process_group("mpi")` without address, rank or size, messages, and gradients averaged by hand."""

import sys  # writes text and end of line in one piece: ranks share the pipe

import torch
import torch.distributed as dist
import torch.nn.functional as F


def send_and_receive(rank: int) -> None:
    if rank == 0:
        x = torch.tensor([1.0, -1.0])
        dist.send(x, dst=1)
        sys.stdout.write("Rank-0 has sent the following tensor to Rank-1\n")
    elif rank == 1:
        z = torch.tensor([0.0, 0.0])
        dist.recv(z, src=0)
        sys.stdout.write(f"Rank-1 has received the following tensor from Rank-0: {z.tolist()}\n")


def sync_initial_weights(model: torch.nn.Module, rank: int, world_size: int) -> None:
    for param in model.parameters():
        if rank == 0:
            for sibling in range(1, world_size):
                dist.send(param.data, dst=sibling)
        else:
            dist.recv(param.data, src=0)


def sync_gradients(model: torch.nn.Module, world_size: int) -> None:
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= world_size


def train(rank: int, world_size: int) -> float:
    torch.manual_seed(rank)  # ranks begin with different weights, until rank 0 hands out its own
    model = torch.nn.Linear(4, 2)
    sync_initial_weights(model, rank, world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.85)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(12, 4, generator=generator), torch.randint(2, (12,), generator=generator)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[rank::world_size]), targets[rank::world_size]).backward()
        sync_gradients(model, world_size)
        optimizer.step()
    return F.cross_entropy(model(inputs), targets).item()


if __name__ == "__main__":
    dist.init_process_group(backend="mpi")
    send_and_receive(dist.get_rank())
    loss = train(dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        sys.stdout.write(f"loss {loss:.4f}\n")
