"""A script that calls torch.distributed itself, and DistributedDataParallel, and then Hora on the same group."""

import sys  # writes text and end of line in one piece: ranks share the pipe

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hora

dist.init_process_group("gloo")
session = hora.init()
assert (session.rank, session.world_size) == (dist.get_rank(), dist.get_world_size())
model = DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(1, 2) * (session.rank + 1)).sum().backward()
mean = hora.all_reduce(torch.tensor([session.rank + 1.0]), hora.ReduceOp.MEAN)
assert torch.allclose(model.module.weight.grad, mean.expand(1, 2))
hora.shutdown()
dist.barrier()
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}: {session.topology.source}, {mean.item():.1f}\n")
dist.destroy_process_group()
