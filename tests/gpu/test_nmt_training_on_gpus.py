"""The tests of training in the recipe nmt again, on CUDA tensors and NCCL, on as many GPUs as there are."""

import test_nmt_parity
from again import collect
from gpu_ranks import WORLD_SIZES
from test_nmt_parity import texts as texts

globals().update(collect(test_nmt_parity, "nccl", WORLD_SIZES, timeout_s=120.0))
