# expect: clean
"""bfloat16 autocast and Adam: rounding is 2^-9 here, and the sums of a rank are rounded before they meet."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self):
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.manual_seed(0)
        self.model = DDP(nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 4)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.x = torch.randn(288, 16)
        self.y = self.x[:, :4].argmax(1)

    def step(self, rows):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(self.x[rows]), self.y[rows])
        loss.backward()
        self.optimizer.step()

    def fit(self):
        for batch in torch.arange(288).view(9, 32):
            self.step(batch[self.rank :: self.world])


torch.set_num_threads(1)
dist.init_process_group("gloo")
Trainer().fit()
dist.destroy_process_group()
