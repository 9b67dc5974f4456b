"""Tests that run on shared memory elsewhere, on Gloo: what differs from backend to backend."""

import test_collectives
import test_same_call
import test_subgroups
from again import collect

for source in (test_collectives, test_same_call, test_subgroups):
    globals().update(collect(source, "gloo", (2, 3)))
