"""Who takes part in a collective: all ranks of the session, or some of them."""

from typing import Protocol

import torch

from hora.comm.groups import Groups
from hora.comm.roll_call import RollCall
from hora.comm.tracker import Tracker


class Members(Protocol):
    """What a collective asks of those who make it; a `Session` is one, a `Subgroup` another."""

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""

    @property
    def rank(self) -> int:
        """Index of this process among them."""

    @property
    def world_size(self) -> int:
        """How many they are."""

    @property
    def groups(self) -> Groups:
        """In which algorithms talk."""

    @property
    def progress(self) -> Tracker:
        """Counts collectives and explains failures."""

    @property
    def roll_call(self) -> RollCall:
        """Has all of them say what they are about to do."""

    @property
    def check_calls(self) -> bool:
        """Whether they call the roll before each collective."""
