"""Translates many sentences on all ranks: each searches batches of its own, and rank 0 gets the results in the order of the sentences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.utils.rnn import pad_sequence

from hora.comm.objects import gather_object
from hora.comm.session import session
from hora.recipes.nmt.decoding.batches import deal_batches, plan_batches
from hora.recipes.nmt.decoding.search import BeamSearch
from hora.recipes.nmt.symbols import EOS, PAD
from hora.train.progress import open_progress


@dataclass(frozen=True)
class Translation:
    """A translation of a sentence, and its score (see `Rules`)."""

    text: str
    score: float


EMPTY: Final = Translation("", 0.0)
"""What an empty sentence is translated to."""


def translate_all(
    search: BeamSearch, sources: Sequence[Sequence[int]], render: Callable[[Sequence[int]], str], *, batch_size: int
) -> list[list[Translation]] | None:
    """Translates `sources` and gives the result to rank 0: of each sentence at most `keep_n` translations, the best first; elsewhere None.

    Batches and their shapes do not depend on the number of ranks, nor does the result.

    Collective: all ranks call it with the same arguments.

    Args:
        search: with models that are the same on all ranks.
        sources: numbers of each sentence, without what begins and ends it. A sentence without any becomes `EMPTY`.
        render: makes text of numbers.
        batch_size: sentences that are searched together.
    """
    here, lengths = session(), [len(source) for source in sources]
    batches = plan_batches(lengths, batch_size)
    dealt = deal_batches(batches, lengths, here.world_size)
    mine = [batches[number] for number in dealt[here.rank]]
    translations = [[EMPTY] for _ in sources]
    with open_progress(len(mine), "translating", rank=here.rank) as progress:
        # Gathered after each batch, so that no rank waits for another for longer than one takes.
        for turn in range(max(map(len, dealt))):
            part = _search(search, sources, mine[turn], render) if turn < len(mine) else None
            for index, texts, scores in (row for each in gather_object(part) or () for row in each or ()):
                translations[index] = [Translation(text, score) for text, score in zip(texts, scores, strict=True)]
            progress.show(min(turn + 1, len(mine)))
    return translations if here.rank == 0 else None


def _search(
    search: BeamSearch, sources: Sequence[Sequence[int]], batch: Sequence[int], render: Callable[[Sequence[int]], str]
) -> list[tuple[int, list[str], list[float]]]:
    """The index of each sentence of a batch, and the texts and scores of its translations."""
    found = search.translate(as_rows([sources[index] for index in batch]))
    return [
        (index, [render(hypothesis.symbols) for hypothesis in each], [hypothesis.score for hypothesis in each])
        for index, each in zip(batch, found, strict=True)
    ]


def as_rows(sources: Sequence[Sequence[int]]) -> torch.Tensor:
    """What an encoder reads: the sentences, each with EOS, `[sentences, longest + 1]`."""
    return pad_sequence([torch.tensor([*source, EOS]) for source in sources], batch_first=True, padding_value=PAD)
