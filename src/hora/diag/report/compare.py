"""From what all ranks have recorded to a report. Pure.

The ranks leave the sums of a step together. Who waited least for them came last, and what that rank did until then is what the step took: its times
are the step's, its own wait is what communication costs, and what the others waited longer was for that rank. So no clock need agree with another.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from hora.diag.report.rank_record import BYTES, HOST, HOST_BOUND, NUM_TRAVELS, REPLAYED, TOOK, RankRecord
from hora.diag.report.slices import Part
from hora.diag.report.step_report import Bandwidth, BucketReport, Lateness, Parts, RankReport, Spread, StepReport
from hora.errors import ConfigError

_P95: Final = 0.95
_CLEARLY: Final = 0.05
"""Part of a step by which a rank is clearly later than the others."""
_MOSTLY: Final = 2 / 3
"""Part of these steps in which it is one rank: more by far than if they took turns."""
_OWN_PARTS: Final = (Part.DATA, Part.COMPUTE, Part.UPDATE, Part.OUTSIDE)
"""What a rank takes for itself, and may take longer for than others."""


class Setting(NamedTuple):
    """What is known beside the records."""

    backend: str
    device: str


def compare(records: Sequence[RankRecord], setting: Setting) -> StepReport:
    """The report, without advice and without what was measured before.

    Raises:
        ConfigError: no step was recorded, or not the same number on all ranks.
    """
    counts = [len(record.steps) for record in records]
    if min(counts) != max(counts):
        raise ConfigError(
            f"a report needs the same steps of all ranks, but they have recorded {', '.join(map(str, counts))} of them: call hora.record_steps() "
            "on all ranks at the same place"
        )
    if not counts[0]:
        raise ConfigError("a report needs a step since recording began, of a DistributedOptimizer or a TrainStep, but there was none")
    first = records[0]
    left_out = min(max(0, first.warm_up - first.dropped), counts[0] // 2)
    steps = torch.stack([record.steps[left_out:] for record in records])
    waits = steps[..., Part.AGREEMENT] + steps[..., Part.COMMUNICATION]
    last = waits.argmin(0)
    of_last = steps[last, torch.arange(steps.shape[1])]
    on_gpu = setting.device == "cuda"
    length = of_last[:, : len(Part)].sum(1)
    return StepReport(
        steps=steps.shape[1],
        left_out=first.dropped + left_out,
        world_size=len(records),
        backend=setting.backend,
        device=setting.device,
        replayed=float(of_last[:, REPLAYED].mean()),
        times=_parts(of_last),
        host=_spread(of_last[:, HOST], length) if on_gpu else None,
        host_bound=float(of_last[:, HOST_BOUND].mean()) if on_gpu else None,
        bucket=_bucket([record.waited[left_out:] for record in records], first, last, length) if len(records) > 1 else None,
        late=_lateness(steps, waits, last) if len(records) > 1 else None,
        bandwidth=_bandwidth(steps) if len(records) > 1 else None,
        sums_bytes=tuple(bucket.size_bytes for bucket in first.buckets),
        ranks=tuple(
            RankReport(rank, record.host, _parts(steps[rank]), float((last == rank).double().mean())) for rank, record in enumerate(records)
        ),
    )


def _parts(steps: Tensor) -> Parts:
    columns = steps[:, : len(Part)]
    length = columns.sum(1)
    return Parts(_spread(length, length), *(_spread(columns[:, part], length) for part in Part))


def _spread(values: Tensor, of: Tensor) -> Spread:
    return Spread(float(values.quantile(0.5)), float(values.quantile(_P95)), float(values.sum() / of.sum()))


def _bucket(waited: Sequence[Tensor], record: RankRecord, last: Tensor, length: Tensor) -> BucketReport | None:
    """The bucket for which the last rank, which waits for nobody else, has waited longest."""
    of_last = torch.stack(list(waited))[last, torch.arange(len(last))]
    if not record.buckets or not of_last.sum() > 0:
        return None
    longest = int(of_last.sum(0).argmax())
    facts = record.buckets[longest]
    return BucketReport(facts.model, facts.index, facts.names, facts.size_bytes, _spread(of_last[:, longest], length))


def _lateness(steps: Tensor, waits: Tensor, last: Tensor) -> Lateness | None:
    """Who came clearly last, by how much, and why."""
    count = steps.shape[1]
    places = torch.arange(count)
    ranks = torch.arange(len(steps))[:, None]
    others = waits.masked_fill(ranks == last, torch.nan).nanquantile(0.5, 0)
    by = others - waits[last, places]
    length = steps[last, places, : len(Part)].sum(1)
    clear = by > _CLEARLY * length
    if not clear.any():
        return None
    rank = int(last[clear].mode().values)
    one = bool(((last == rank) & clear).sum() >= _MOSTLY * clear.sum())
    clear = clear & (last == rank) if one else clear
    excess = {part: _own_and_others(steps[..., part], last, clear) for part in _OWN_PARTS}
    because = max(excess, key=lambda part: excess[part][0] - excess[part][1])
    own_s, others_s = excess[because]
    return Lateness(
        rank=rank if one else None,
        steps=float(clear.double().mean()),
        by_s=float(by[clear].quantile(0.5)),
        share=float(by[clear].sum() / length.sum()),
        because=because.name.lower(),
        own_s=own_s,
        others_s=others_s,
    )


def _own_and_others(part: Tensor, last: Tensor, chosen: Tensor) -> tuple[float, float]:
    """What the last rank and the others took for a part, medians of the chosen steps."""
    own = part[last, torch.arange(len(last))]
    others = part.masked_fill(torch.arange(len(part))[:, None] == last, torch.nan).nanquantile(0.5, 0)
    return float(own[chosen].quantile(0.5)), float(others[chosen].quantile(0.5))


def _bandwidth(steps: Tensor) -> Bandwidth | None:
    """Of each step that of the rank for which the sums took the shortest time, since on others they wait for somebody."""
    took = steps[..., TOOK].masked_fill(steps[..., TOOK] == 0, torch.inf)
    quickest = took.argmin(0)
    of_quickest = steps[quickest, torch.arange(steps.shape[1])]
    known = of_quickest[of_quickest[:, TOOK] > 0]
    if not len(known):
        return None
    rates = known[:, BYTES] / known[:, TOOK]
    size_bytes = int(known[:, BYTES].sum() / known[:, NUM_TRAVELS].sum())
    return Bandwidth(float(rates.quantile(0.5)) / 1e9, size_bytes, None)
