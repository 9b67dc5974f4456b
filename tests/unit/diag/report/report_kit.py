"""Steps as ranks would have recorded them, written by hand."""

import torch

from hora.diag.report.rank_record import BYTES, HOST, HOST_BOUND, NUM_COLUMNS, NUM_TRAVELS, REPLAYED, TOOK, RankRecord
from hora.diag.report.slices import Part
from hora.plan.buckets import BucketFacts

EMBEDDING = BucketFacts(0, 1, ("embedding.weight",), 39_000_000)
HEAD = BucketFacts(0, 0, ("head.bias", "head.weight", "norm.weight"), 1_200_000)
COLUMNS = {"took": TOOK, "sent_bytes": BYTES, "num_travels": NUM_TRAVELS, "replayed": REPLAYED, "host": HOST, "host_bound": HOST_BOUND}


def record(*steps: dict, host: str = "a", warm_up: int = 0, dropped: int = 0, gathers: bool = False) -> RankRecord:
    """A rank's steps: seconds by the name of the part, other columns by their name, and `waited` for HEAD and EMBEDDING."""
    table = torch.zeros(len(steps), NUM_COLUMNS, dtype=torch.float64)
    waited = torch.zeros(len(steps), 2, dtype=torch.float64)
    for row, step in enumerate(steps):
        for name, value in step.items():
            if name == "waited":
                waited[row] = torch.tensor(value)
            else:
                table[row, COLUMNS[name] if name in COLUMNS else Part[name.upper()]] = value
    return RankRecord(host, dropped, warm_up, table, (HEAD, EMBEDDING), waited, gathers)
