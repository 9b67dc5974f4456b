"""A script started once a node, which starts a process for each GPU there: `--nodes 2 --gpus 2 --nr 0` on the first, `--nr 1` on the second."""

import argparse
import os
import sys  # writes text and end of line in one piece: ranks share the pipe

import torch
import torch.multiprocessing as mp

import hora


def train(local_rank: int, args: argparse.Namespace) -> None:
    rank = args.nr * args.gpus + local_rank
    hora.init(init_method="env://", rank=rank, world_size=args.gpus * args.nodes, device="cpu", timeout_s=60.0)
    total = hora.all_reduce(torch.tensor([float(rank)]))
    sys.stdout.write(f"rank {hora.rank()} of {hora.world_size()} found {total.item():.0f}\n")
    hora.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", "--nodes", type=int, default=1)
    parser.add_argument("-g", "--gpus", type=int, default=1)
    parser.add_argument("-nr", "--nr", type=int, default=0)
    parser.add_argument("--master-port", required=True)
    arguments = parser.parse_args()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", arguments.master_port
    mp.spawn(train, nprocs=arguments.gpus, args=(arguments,))
