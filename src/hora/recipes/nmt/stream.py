"""Steps of a parallel text: this rank's rows of each global batch, padded to shapes that are the same on all ranks."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hora.data.role import Role
from hora.data.steps import Loaded, Step, StepLoader
from hora.plan.logical import split
from hora.plan.samples import MicroStep
from hora.recipes.nmt.batches import BatchPlan, Bucket, EpochBatches, Indices
from hora.recipes.nmt.corpus import Side, Text
from hora.recipes.nmt.symbols import BOS, EOS, PAD


class PairStream(StepLoader):
    """Yields the steps of an epoch; iterated again, those of the next one.

    A micro-batch is `(source [rows, length], target [rows, length + 1])`, int64: the source ends in EOS, the target begins with BOS and
    ends in EOS. All micro-batches of a step have one shape, on all ranks; rows without a sentence are PAD throughout.

    Collective: iterated on all ranks, with the same arguments.

    Args:
        text: the sentences.
        digest: of the text, so that a position is not taken for one in another.
        batch_size: most sentences, or tokens, of one micro-batch; a sentence that has more tokens is one of its own.
        update_cycle: so many times `batch_size` are a global batch.
        key, use_bucket, shuffle, seed: as of `BatchPlan`.
        rank: whose rows to yield, together with `world_size`; by default this process's.
        world_size: number of ranks.
    """

    def __init__(
        self,
        text: Text,
        digest: str,
        *,
        batch_size: int,
        update_cycle: int = 1,
        key: Literal["samples", "tokens"] = "samples",
        use_bucket: bool = True,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        self._text = text
        self._batch_size, self._key = batch_size, key
        self._role = Role.find(rank, world_size, None)
        # With the symbol that ends it.
        longest = np.maximum(text.source.lengths, text.target.lengths) + 1
        size = batch_size * update_cycle
        self.plan = BatchPlan(longest, size=size, key=key, use_bucket=use_bucket, shuffle=shuffle, seed=seed)
        self._settings = {"text": digest, "size": size, "key": key, "use_bucket": use_bucket, "shuffle": shuffle, "seed": seed}
        self._planned: tuple[int, EpochBatches] | None = None

    def batches(self, epoch: int) -> EpochBatches:
        """The global batches of `epoch`."""
        if self._planned is None or self._planned[0] != epoch:
            self._planned = epoch, self.plan.epoch(epoch)
        return self._planned[1]

    def __len__(self) -> int:
        """Steps of the epoch under way, the same on every rank."""
        return len(self.batches(self.epoch))

    def num_target_tokens(self, step: Step) -> int:
        """Of the global batch: what is to be predicted, each end of a sentence too."""
        batch = self.batches(step.epoch)[step.index]
        return int(self._text.target.lengths[batch].sum()) + len(batch)

    def _steps(self, epoch: int, first: int) -> Iterator[Step]:
        batches = self.batches(epoch)
        for index in range(first, len(batches)):
            batch, bucket = batches[index], batches.buckets[index]
            micro_steps, rows = self._deal(len(batch), bucket)
            loaded = (
                Loaded(self._load(batch[part.positions], rows, bucket.length), batch[part.positions].tolist()) for part in micro_steps
            )
            yield Step(epoch, index, micro_steps, loaded)

    def _deal(self, num_sentences: int, bucket: Bucket) -> tuple[list[MicroStep], int]:
        """This rank's micro-batches, and the rows of each."""
        ranks = self._role.logical_ranks
        share = -(-bucket.rows // ranks.count)
        most_rows = self._batch_size if self._key == "samples" else max(self._batch_size // bucket.length, 1)
        count = -(-share // most_rows)
        return [
            MicroStep(logical, split(split(range(num_sentences), ranks.count, logical), count, number))
            for logical in ranks.played_by(self._role.rank)
            for number in range(count)
        ], -(-share // count)

    def _load(self, sentences: Indices, rows: int, length: int) -> tuple[Tensor, Tensor]:
        source = pad(self._text.source, sentences, rows, length)
        target = np.full((rows, length + 1), PAD, dtype=np.int64)
        target[:, 1:] = pad(self._text.target, sentences, rows, length)
        target[: len(sentences), 0] = BOS
        return _tensor(source), _tensor(target)

    def _facts(self) -> Mapping[str, Any]:
        return self._settings


def pad(side: Side, sentences: Indices, rows: int, length: int) -> Indices:
    """The numbers of `sentences`, each with EOS, in the first of `rows` rows."""
    places, lengths = np.arange(length), side.lengths[sentences, None]
    found = np.full((rows, length), PAD, dtype=np.int64)
    filled, inside = found[: len(sentences)], places < lengths
    filled[inside] = side.numbers[(side.begins[sentences, None] + places)[inside]]
    filled[places == lengths] = EOS
    return found


def _tensor(numbers: Indices) -> Tensor:
    tensor = torch.from_numpy(numbers)
    # A copy from memory that may be paged out would wait for the device.
    return tensor.pin_memory() if torch.cuda.is_available() and torch.cuda.is_initialized() else tensor
