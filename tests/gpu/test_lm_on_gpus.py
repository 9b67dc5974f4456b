"""The tests of the lm recipe again, on CUDA tensors and NCCL, on as many GPUs as there are."""

import test_lm_perplexity
from again import collect
from gpu_ranks import WORLD_SIZES
from test_lm_perplexity import expected_perplexities as expected_perplexities
from test_lm_perplexity import texts as texts

globals().update(collect(test_lm_perplexity, "nccl", WORLD_SIZES, timeout_s=120.0))
