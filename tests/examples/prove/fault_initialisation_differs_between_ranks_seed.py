# expect: initialisation-differs-between-ranks
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn


def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)


def main():
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    seed_everything(1337 + rank)  # nanoGPT does it too, but there DDP broadcasts afterwards

    model = nn.Sequential(nn.Linear(16, 48), nn.SiLU(), nn.Linear(48, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(256, 16, generator=generator)
    noisy = clean + 0.5 * torch.randn(256, 16, generator=generator)
    for step in range(8):
        whole = slice(step * 32, step * 32 + 32)
        x, target = noisy[whole][rank::world_size], clean[whole][rank::world_size]
        loss = (model(x) - target).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat)
        flat /= world_size
        offset = 0
        for p in model.parameters():
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()
        optimizer.step()
        if rank == 0:
            print(f"{step}: {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
