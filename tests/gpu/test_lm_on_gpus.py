"""The tests of the lm recipe again, on CUDA tensors and NCCL, on as many GPUs as there are."""

import test_lm_perplexity
from test_lm_perplexity import expected_perplexities as expected_perplexities
from test_lm_perplexity import texts as texts
from test_parity_on_gpus import collect

globals().update(collect(test_lm_perplexity))
