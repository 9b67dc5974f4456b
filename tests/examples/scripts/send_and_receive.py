"""Rank 0 sends a tensor and rank 1 prints it: the first program of every course, started by whatever starts it."""

import sys  # writes text and end of line in one piece: ranks share the pipe

import torch

import hora

hora.init(device="cpu", timeout_s=60.0)
if hora.rank() == 0:
    hora.send(torch.tensor([1.0, -1.0]), dst=1)
    sys.stdout.write("Rank-0 has sent the tensor to Rank-1\n")
else:
    received = hora.recv(torch.tensor([0.0, 0.0]), src=0)
    sys.stdout.write(f"Rank-1 has received {received.tolist()} from Rank-0\n")
