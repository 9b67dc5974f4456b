# expect: random-numbers-per-rank
"""Denoising autoencoder: the noise is drawn in forward, no dropout layer anywhere."""
import torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(12)


class DenoisingAutoencoder(nn.Module):
    def __init__(self, size=16, hidden=8, sigma=0.3):
        super().__init__()
        self.sigma = sigma
        self.encoder = nn.Linear(size, hidden)
        self.decoder = nn.Linear(hidden, size)

    def forward(self, x):
        if self.training:
            x = x + self.sigma * torch.randn_like(x)
        return self.decoder(torch.tanh(self.encoder(x)))


model = nn.parallel.DistributedDataParallel(DenoisingAutoencoder())
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
samples = torch.randn(320, 4) @ torch.randn(4, 16)
for batch in samples.split(32):
    mine = batch.chunk(world)[rank]
    loss = nn.functional.mse_loss(model(mine), mine)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(rank, loss.item())
dist.destroy_process_group()
