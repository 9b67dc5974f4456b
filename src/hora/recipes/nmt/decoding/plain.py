"""Beam search as it is written down: one sentence at a time, every prefix read anew. The oracle of `search`, and the slow end of its benchmark."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hora.recipes.nmt.decoding.rules import Hypothesis, Rules
from hora.recipes.nmt.models.base import Memory, TranslationModel
from hora.recipes.nmt.symbols import BOS, EOS, PAD

_Prefix = tuple[list[int], float]


@torch.no_grad()
def search_plainly(models: Sequence[TranslationModel], source: Sequence[int], rules: Rules) -> list[Hypothesis]:
    """The `keep_n` best translations of a sentence under the mean of what the models give, the best first."""
    memories = [model.encode(torch.tensor([list(source)], device=model.device)) for model in models]
    live: list[_Prefix] = [([], 0.0)]
    finished: list[Hypothesis] = []
    limit = rules.limit(len(source))
    for length in range(1, limit + 1):
        candidates: list[_Prefix] = []
        for (symbols, total), following in zip(live, _following(models, memories, [symbols for symbols, _ in live]), strict=True):
            best = following.topk(min(2 * rules.beam_size, len(following)))
            candidates += [([*symbols, symbol], total + value) for value, symbol in zip(*map(Tensor.tolist, best), strict=True)]
        candidates = sorted(candidates, key=lambda candidate: -candidate[1])[: 2 * rules.beam_size]
        for symbols, total in candidates[: rules.beam_size]:
            if (symbols[-1] == EOS or length == limit) and total > -math.inf:
                finished.append(Hypothesis([symbol for symbol in symbols if symbol != EOS], total / rules.penalty(length)))
        live = [(symbols, total) for symbols, total in candidates if symbols[-1] != EOS][: rules.beam_size]
    return sorted(finished, key=lambda hypothesis: -hypothesis.score)[: rules.keep_n]


def _following(models: Sequence[TranslationModel], memories: Sequence[Memory], prefixes: Sequence[Sequence[int]]) -> Tensor:
    """Logarithms of the probability of each symbol after each of the prefixes, `[prefixes, target_size]`."""
    given = torch.tensor([[BOS, *symbols] for symbols in prefixes], device=models[0].device)
    each = []
    for model, memory in zip(models, memories, strict=True):
        shared = Memory(*(tensor.expand(len(prefixes), *tensor.shape[1:]) for tensor in memory))
        each.append(model.decode(shared, given)[:, -1].log_softmax(-1))
    mean = torch.stack(each).logsumexp(0) - math.log(len(models))
    mean[:, [PAD, BOS]] = -math.inf
    return mean
