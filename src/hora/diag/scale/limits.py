"""What keeps more ranks from being as much faster, in a sentence. Pure."""

from collections.abc import Mapping, Sequence

from hora.diag.scale.point import Point

_WORTH_SAYING = 0.03
"""Part of a step."""

_WORDS = {
    "outside": "what is between steps (evaluation, checkpoints, logging, a loader that is not Hora's)",
    "data": "waiting for data",
    "compute": "forward and backward, which do not shrink in proportion",
    "agreement": "waiting for the other ranks to agree on the step",
    "communication": "sums that backward does not hide",
    "update": "the update, which every rank makes in full",
    "device": "the host waiting for the device",
    "late": "ranks that come late",
}
_WEAK_WORDS = {
    "compute": "forward and backward, which take longer beside other ranks",
    "update": "the update, which takes longer beside other ranks",
}


def losses(points: Sequence[Point], kind: str) -> dict[str, float]:
    """By part, what a step on most ranks is longer than on fewest if all work were dealt out evenly; as a part of that step.

    `late` is that part of the longer forward and backward and waiting for data for which other ranks waited.
    """
    base, last = min(points, key=lambda point: point.ranks), max(points, key=lambda point: point.ranks)
    share = 1.0 if kind == "weak" else base.ranks / last.ranks
    longer = {part: (last.parts_s[part] - share * base.parts_s[part]) / last.median_s for part in last.parts_s}
    late = min(last.late, max(0.0, longer["compute"]) + max(0.0, longer["data"]))
    for part in ("compute", "data"):
        taken = min(late, max(0.0, longer[part]))
        longer[part], longer["late"] = longer[part] - taken, longer.get("late", 0.0) + taken
        late -= taken
    return longer


def say_limit(found: Mapping[str, float], kind: str, ranks: int) -> str:
    """The sentence."""
    words = _WORDS | _WEAK_WORDS if kind == "weak" else _WORDS
    name = max(found, key=lambda part: found[part])
    if found[name] < _WORTH_SAYING:
        return f"Nothing costs more than {_WORTH_SAYING:.0%} of a step on {ranks} ranks."
    others = sorted((part for part in found if part != name and found[part] >= _WORTH_SAYING), key=lambda part: -found[part])
    beside = "".join(f"; {found[part]:.0%} {words[part]}" for part in others)
    return f"What limits on {ranks} ranks: {found[name]:.0%} of a step is {words[name]}{beside}."
