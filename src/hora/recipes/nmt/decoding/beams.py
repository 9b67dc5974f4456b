"""The hypotheses of many sentences on the device, and what a step does to them: nothing here waits for the device, and no shape ever changes.

A hypothesis is not a row of symbols but a way back: for each place the symbol chosen, and which hypothesis of the place before it went on from.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hora.recipes.nmt.decoding.rules import MORE_SYMBOLS, Hypothesis, Rules
from hora.recipes.nmt.models import TranslationModel
from hora.recipes.nmt.symbols import BOS, EOS, PAD

_GROUP: Final = 32


class Beams(NamedTuple):
    """Where the search stands. Hypotheses stand in the order of their sums, finished ones in that of their scores; minus infinity: there is none.

    Attributes:
        position: symbols of each live hypothesis, `[]` int64.
        symbols: the last one, `[sentences, beam]`.
        sums: of logarithms of probability, `[sentences, beam]`.
        trail_symbols: chosen at each place, `[capacity, sentences, beam]`.
        trail_parents: which hypothesis of the place before that one continues, likewise.
        scores: of finished hypotheses, `[sentences, beam]`.
        lengths: of finished ones, with the end.
        parents: which hypothesis of the place before its last symbol a finished one was.
        last_symbols: of finished ones, EOS or what stood at the limit.
        limits: most symbols of a translation, `[sentences]`.
    """

    position: Tensor
    symbols: Tensor
    sums: Tensor
    trail_symbols: Tensor
    trail_parents: Tensor
    scores: Tensor
    lengths: Tensor
    parents: Tensor
    last_symbols: Tensor
    limits: Tensor

    @classmethod
    def begin(cls, lengths: Tensor, rules: Rules, capacity: int, dtype: torch.dtype) -> "Beams":
        """One hypothesis without symbols for each source of `lengths` `[sentences]`, its end counted in; none where that is 0."""
        shape, device = (len(lengths), rules.beam_size), lengths.device
        counts, trail = (torch.zeros(size, dtype=torch.int64, device=device) for size in (shape, (capacity, *shape)))
        none = torch.full(shape, -math.inf, dtype=dtype, device=device)
        sums = none.clone()
        sums[:, 0].masked_fill_(lengths > 0, 0.0)
        limits = (rules.max_ratio * lengths.double() + MORE_SYMBOLS).clamp_max(rules.max_steps).long()
        return cls(
            counts.new_zeros(()), counts + BOS, sums, trail, trail.clone(), none, counts.clone(), counts.clone(), counts.clone(), limits
        )


def advance(models: Sequence[TranslationModel], states: Sequence[Any], beams: Beams, rules: Rules) -> None:
    """Adds a symbol to each hypothesis, in place."""
    values, symbols = largest(_following(models, states, beams), 2 * rules.beam_size)
    sums, places = (beams.sums[:, :, None] + values).flatten(1).topk(2 * rules.beam_size)
    symbols = symbols.flatten(1).gather(1, places)
    parents = places // values.size(2)
    ends = (symbols == EOS) | (beams.position + 1 >= beams.limits)[:, None]
    _finish(beams, rules, sums.masked_fill(~ends, -math.inf), symbols, parents)
    sums, places = sums.masked_fill(ends, -math.inf).topk(rules.beam_size)
    symbols, parents = symbols.gather(1, places), parents.gather(1, places)
    beams.sums.copy_(sums)
    beams.symbols.copy_(symbols)
    beams.trail_symbols.index_copy_(0, beams.position[None], symbols[None])
    beams.trail_parents.index_copy_(0, beams.position[None], parents[None])
    beams.position.add_(1)
    for model, state in zip(models, states, strict=True):
        model.reorder(state, parents)


def _following(models: Sequence[TranslationModel], states: Sequence[Any], beams: Beams) -> Tensor:
    """Logarithms of the probability of each symbol after each hypothesis, the mean over all models: `[sentences, beam, target_size]`."""
    each = [
        model.project(model.step(beams.symbols, beams.position, state)).log_softmax(2) for model, state in zip(models, states, strict=True)
    ]
    mean = each[0] if len(each) == 1 else torch.stack(each).logsumexp(0) - math.log(len(each))
    mean[:, :, PAD] = -math.inf
    mean[:, :, BOS] = -math.inf
    return mean


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `values.topk(count)`, for long rows: the largest ones are in the groups with the largest maxima, which are found in one reading.

    A plain `topk` reads its rows again for each few bits of a number.
    """
    groups = values.size(-1) // _GROUP
    if groups < count:
        return values.topk(min(count, values.size(-1)))
    grouped, rest = values[..., : groups * _GROUP].unflatten(-1, (groups, _GROUP)), values[..., groups * _GROUP :]
    chosen = grouped.amax(-1).topk(count).indices[..., None]
    places = chosen * _GROUP + torch.arange(_GROUP, device=values.device)
    candidates = torch.cat([grouped.gather(-2, chosen.expand_as(places)).flatten(-2), rest], dim=-1)
    rest_places = torch.arange(groups * _GROUP, values.size(-1), device=values.device).expand(*values.shape[:-1], -1)
    found, within = candidates.topk(count)
    return found, torch.cat([places.flatten(-2), rest_places], dim=-1).gather(-1, within)


def _finish(beams: Beams, rules: Rules, sums: Tensor, symbols: Tensor, parents: Tensor) -> None:
    """Puts the first candidates that end, which alone have sums, among the finished ones, of which the best stay."""
    sums, symbols, parents = (tensor[:, : rules.beam_size] for tensor in (sums, symbols, parents))
    length = beams.position + 1
    scores, places = torch.cat([beams.scores, sums / _penalty(length, rules, sums.dtype)], dim=1).topk(rules.beam_size)
    beams.scores.copy_(scores)
    news = (beams.lengths, length.expand_as(parents)), (beams.parents, parents), (beams.last_symbols, symbols)
    for old, new in news:
        old.copy_(torch.cat([old, new], dim=1).gather(1, places))


def _penalty(length: Tensor, rules: Rules, dtype: torch.dtype) -> Tensor:
    return ((length.to(dtype) + 5) / 6) ** rules.alpha


def all_closed(beams: Beams, rules: Rules) -> Tensor:
    """Whether no live hypothesis can be among the best `keep_n` any more, in any sentence: `[]` bool."""
    penalties = [_penalty(length, rules, beams.sums.dtype) for length in (beams.position + 1, beams.limits)]
    reachable = beams.sums[:, 0] / torch.maximum(*penalties)
    return (reachable <= beams.scores[:, rules.keep_n - 1]).all()


def collect(beams: Beams, rules: Rules, sentences: int) -> list[list[Hypothesis]]:
    """The best finished hypotheses of each of the first `sentences`, at most `keep_n`, the best first."""
    here = Beams(*(tensor.cpu() for tensor in beams))
    best = [tensor[:sentences, : rules.keep_n] for tensor in (here.scores, here.lengths, here.last_symbols)]
    rows = _retrace(here, rules.keep_n)[:sentences].tolist()
    return [
        [
            Hypothesis(symbols[: length - 1] + [last] * (last != EOS), score)
            for symbols, score, length, last in zip(*found, strict=True)
            if score > -math.inf
        ]
        for found in zip(rows, *(tensor.tolist() for tensor in best), strict=True)
    ]


def _retrace(beams: Beams, keep_n: int) -> Tensor:
    """The symbols of the best finished hypotheses but for the last ones, `[sentences, keep_n, longest]`."""
    lengths, parents = beams.lengths[:, :keep_n], beams.parents[:, :keep_n]
    longest = max(int(lengths.max()) - 1, 0)
    symbols = torch.zeros(*lengths.shape, longest, dtype=torch.int64)
    for place in reversed(range(longest)):
        inside = place < lengths - 1
        symbols[:, :, place] = torch.where(inside, beams.trail_symbols[place].gather(1, parents), PAD)
        parents = torch.where(inside, beams.trail_parents[place].gather(1, parents), parents)
    return symbols
