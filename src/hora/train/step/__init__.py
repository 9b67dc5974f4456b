"""A whole step of training in one call: eagerly, or on a GPU as a CUDA graph that is captured once and replayed.

`train_step` is what users call, `forward` what a step is made of, `graph` one captured step and its replay, `tree` goes through nested batches.
"""

from hora.train.step.train_step import StepResult, TrainStep

__all__ = ["StepResult", "TrainStep"]
