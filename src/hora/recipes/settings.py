"""What the configurations of several recipes have in common. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept: a checkpoint is written after each epoch, and every `every_steps` steps unless that is None.

    `background`: while training goes on, from a copy of the state. What is saved when a signal stops the run is waited for in any case.
    `end_after_failed_saves`: where the disk refuses a checkpoint training goes on, with a warning, until so many in a row have failed; 1: it
    ends at the first. The last save of a run, and that after a signal, must succeed in any case.
    """

    every_steps: Count | None = None
    keep_last: Count = 2
    keep_best: Annotated[int, Field(ge=0)] = 1
    background: bool = True
    end_after_failed_saves: Count = 3
