"""The hypotheses of many sentences on the device, and what a step does to them: nothing here waits for the device, and no shape ever changes.

A hypothesis is not a row of symbols but a way back: for each place the symbol chosen, and which hypothesis of the place before it went on from.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hora.recipes.nmt.decoding.rules import Hypothesis, Rules
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
        parents: which hypothesis of the place before its end a finished one was.
    """

    position: Tensor
    symbols: Tensor
    sums: Tensor
    trail_symbols: Tensor
    trail_parents: Tensor
    scores: Tensor
    lengths: Tensor
    parents: Tensor

    @classmethod
    def begin(cls, sentences: Tensor, rules: Rules, capacity: int, dtype: torch.dtype) -> "Beams":
        """One hypothesis without symbols a sentence; none where `sentences` `[sentences]` is False."""
        shape, device = (len(sentences), rules.beam_size), sentences.device
        counts, trail = (torch.zeros(size, dtype=torch.int64, device=device) for size in (shape, (capacity, *shape)))
        none = torch.full(shape, -math.inf, dtype=dtype, device=device)
        sums = none.clone()
        sums[:, 0].masked_fill_(sentences, 0.0)
        return cls(counts.new_zeros(()), counts + BOS, sums, trail, trail.clone(), none, counts.clone(), counts.clone())


def advance(models: Sequence[TranslationModel], states: Sequence[Any], beams: Beams, rules: Rules) -> None:
    """Adds a symbol to each hypothesis, in place."""
    values, symbols = largest(_following(models, states, beams), 2 * rules.beam_size)
    sums, places = (beams.sums[:, :, None] + values).flatten(1).topk(2 * rules.beam_size)
    symbols = symbols.flatten(1).gather(1, places)
    parents = places // values.size(2)
    _finish(beams, rules, sums, symbols, parents)
    sums, places = sums.masked_fill(symbols == EOS, -math.inf).topk(rules.beam_size)
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
    """Puts the candidates that end among the finished ones, of which the best stay."""
    sums, symbols, parents = (tensor[:, : rules.beam_size] for tensor in (sums, symbols, parents))
    length = beams.position + 1
    ended = (sums / _penalty(length, rules, sums.dtype)).masked_fill(symbols != EOS, -math.inf)
    scores, places = torch.cat([beams.scores, ended], dim=1).topk(rules.beam_size)
    beams.scores.copy_(scores)
    beams.lengths.copy_(torch.cat([beams.lengths, length.expand_as(parents)], dim=1).gather(1, places))
    beams.parents.copy_(torch.cat([beams.parents, parents], dim=1).gather(1, places))


def _penalty(length: Tensor, rules: Rules, dtype: torch.dtype) -> Tensor:
    return ((length.to(dtype) + 5) / 6) ** rules.alpha


def all_closed(beams: Beams, rules: Rules) -> Tensor:
    """Whether no live hypothesis can be among the best `keep_n` any more, in any sentence: `[]` bool."""
    soonest, latest = _penalty(beams.position + 1, rules, beams.sums.dtype), rules.penalty(rules.max_steps)
    reachable = beams.sums[:, 0] / soonest.clamp_min(latest)
    return (reachable <= beams.scores[:, rules.keep_n - 1]).all()


def collect(beams: Beams, rules: Rules, sentences: int) -> list[list[Hypothesis]]:
    """The best hypotheses of each of the first `sentences`, at most `keep_n`, the best first."""
    here = Beams(*(tensor.cpu() for tensor in beams))
    scores, lengths, parents = here.scores, here.lengths, here.parents
    position, (_, beam_size) = int(here.position), scores.shape
    if position == rules.max_steps:  # what still lives ends as it is; one step further on than it would have ended
        scores = torch.cat([scores, here.sums / rules.penalty(position)], dim=1)
        lengths = torch.cat([lengths, torch.full_like(lengths, position + 1)], dim=1)
        parents = torch.cat([parents, torch.arange(beam_size).expand_as(here.parents)], dim=1)
    scores, places = scores.topk(rules.keep_n)
    lengths, parents = lengths.gather(1, places), parents.gather(1, places)
    rows = _retrace(here, lengths, parents)
    return [
        [Hypothesis(symbols[: length - 1], score) for symbols, length, score in zip(*found, strict=True) if score > -math.inf]
        for found in zip(rows.tolist()[:sentences], lengths.tolist(), scores.tolist(), strict=False)
    ]


def _retrace(beams: Beams, lengths: Tensor, parents: Tensor) -> Tensor:
    """The symbols of hypotheses with these `lengths` (the end counted in) that end after `parents`, `[sentences, keep_n, longest]`."""
    longest = max(int(lengths.max()) - 1, 0)
    symbols = torch.zeros(*lengths.shape, longest, dtype=torch.int64)
    for place in reversed(range(longest)):
        inside = place < lengths - 1
        symbols[:, :, place] = torch.where(inside, beams.trail_symbols[place].gather(1, parents), PAD)
        parents = torch.where(inside, beams.trail_parents[place].gather(1, parents), parents)
    return symbols
