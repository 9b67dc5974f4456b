"""The parity tests again, on CUDA tensors and NCCL, on as many of 1, 2, 3 and 4 GPUs as there are."""

import test_batch_statistics
import test_checks
import test_gradients
import test_optimizer_contract
import test_recomputed
import test_same_call
import test_sharded
import torch
from again import collect

WORLD_SIZES = [n for n in (1, 2, 3, 4) if n <= torch.cuda.device_count()] or [1]

for source in (test_gradients, test_optimizer_contract, test_batch_statistics, test_same_call, test_checks, test_sharded, test_recomputed):
    globals().update(collect(source, "nccl", WORLD_SIZES, timeout_s=120.0))
