"""A run of the lm recipe that is stopped and goes on, bit for bit, on CUDA tensors and NCCL."""

import test_lm_resume
from again import collect
from gpu_ranks import WORLD_SIZES
from test_lm_resume import texts as texts

# What three CPU ranks began is compared to rounding there; here it is enough that a run goes on to the last bit.
NOT_HERE = {"test_run_of_three_ranks_goes_on_with_any_number"}

globals().update(
    {name: test for name, test in collect(test_lm_resume, "nccl", WORLD_SIZES, timeout_s=120.0).items() if name not in NOT_HERE}
)
