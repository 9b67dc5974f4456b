"""The parity tests again, on CUDA tensors and NCCL, on as many of 1, 2, 3 and 4 GPUs as there are."""

import test_batch_statistics
import test_checks
import test_gradients
import test_narrow
import test_optimizer_contract
import test_recomputed
import test_same_call
import test_sharded
import test_users_hooks
from again import collect
from gpu_ranks import WORLD_SIZES

for source in (
    test_gradients,
    test_optimizer_contract,
    test_batch_statistics,
    test_same_call,
    test_checks,
    test_sharded,
    test_recomputed,
    test_users_hooks,
    test_narrow,
):
    globals().update(collect(source, "nccl", WORLD_SIZES, timeout_s=120.0))
