"""On how many ranks tests run on the GPUs that are here: one a GPU, or with HORA_SHARE_GPUS=1 up to four on any number of GPUs."""

import os

import pytest
import torch

from hora import env

NUM_GPUS = torch.cuda.device_count()
MOST_RANKS = max(NUM_GPUS, 4) if NUM_GPUS and os.environ.get(env.SHARE_GPUS) == "1" else NUM_GPUS
WORLD_SIZES = [n for n in (1, 2, 3, 4) if n <= MOST_RANKS] or [1]
SEVERAL = [n for n in WORLD_SIZES if n > 1] or [2]
UNSHARED = [n for n in WORLD_SIZES if n <= NUM_GPUS] or [1]
"""For what measures time or memory of a GPU: each rank has one of its own."""

needs_two = pytest.mark.skipif(MOST_RANKS < 2, reason="needs two GPUs, or HORA_SHARE_GPUS=1")
needs_two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
