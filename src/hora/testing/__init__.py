"""What tests of distributed code need: real ranks that are there at once, and guards against what tests leave behind.

Put `pytest_plugins = ["hora.testing.plugin"]` into the topmost conftest.py. Imported by tests alone.
"""

from hora.testing.outcomes import Outcome, RanksFailed
from hora.testing.runs import run_ranks
from hora.testing.spawned import SpawnedRanks
from hora.testing.telling import tell

__all__ = ["Outcome", "RanksFailed", "SpawnedRanks", "run_ranks", "tell"]
