"""The texts as numbers, made once by one rank and mapped into the memory of all.

The numbered texts are one file, whose name is a digest of the texts, the vocabularies and what decides which lines are kept: it appears
whole, and a later run with the same texts finds it. Rank 0 makes it; a host that lacks it gets it from there, so that only the machine of
rank 0 needs the texts.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from hora import log
from hora.comm.objects import all_gather_object
from hora.comm.session import session
from hora.errors import ConfigError
from hora.recipes.fetch import cache_directory
from hora.recipes.nmt.building import build_vocabularies
from hora.recipes.nmt.config import DataConfig
from hora.recipes.nmt.texts import Findings, LineCheck, locate, read_pairs, require_texts, texts_of
from hora.recipes.nmt.vocabulary import Vocabularies
from hora.recipes.vocabularies import FILE_NAME
from hora.train.checkpoint.content import share_tensor
from hora.train.checkpoint.tensors import TensorFile
from hora.train.files import create_file
from hora.train.rank_zero import on_rank_zero

Numbers = NDArray[np.int32]

_FORMAT: Final = 1
_CHUNK: Final = 100_000
"""Lines that are numbered at once, while the other ranks wait: far less than a deadline."""


@dataclass(frozen=True)
class Side:
    """The sentences of one side of a text, one after the other.

    Attributes:
        numbers: of all, int32 `[total]`.
        ends: where each ends, int64 `[sentences]`.
    """

    numbers: Numbers
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def begins(self) -> NDArray[np.int64]:
        """Where each begins."""
        return self.ends - self.lengths

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """How long each is."""
        return np.diff(self.ends, prepend=0)

    def __getitem__(self, index: int) -> Numbers:
        return self.numbers[self.ends[index - 1] if index else 0 : self.ends[index]]


@dataclass(frozen=True)
class Text:
    """Sentences and their translations."""

    source: Side
    target: Side

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class Corpus:
    """Vocabularies and texts.

    Attributes:
        texts: `train`, `valid`, and `test` if there is one.
        digest: tells these texts from others.
    """

    vocabularies: Vocabularies
    texts: Mapping[str, Text]
    digest: str


def load_corpus(data: DataConfig, kept: Path | None = None) -> Corpus:
    """Reads and numbers the texts, or finds them numbered. Collective.

    Args:
        data: the section of the configuration.
        kept: run directory that goes on, whose vocabularies are used.

    Raises:
        ConfigError: on all ranks; a text or vocabulary is missing, damaged, or holds lines that `data` does not allow.
        CheckpointError: the vocabularies of the run that goes on are gone.
    """
    made: list[tuple[Vocabularies, str]] = []

    def prepare() -> dict[str, str]:
        require_texts([name for names in texts_of(data).values() for name in names])
        vocabularies = Vocabularies.read(kept) if kept is not None and (kept / FILE_NAME).exists() else build_vocabularies(data)
        made.append((vocabularies, _digest(data, vocabularies)))
        return {"vocabularies": vocabularies.to_json(), "digest": made[0][1]}

    told = on_rank_zero(prepare)
    vocabularies = made[0][0] if made else Vocabularies.from_json(told["vocabularies"])
    path = _cache(data) / f"nmt-{told['digest'][:40]}.safetensors"
    work = _number_texts(data, vocabularies, path)
    # In pieces, so that no rank waits for the whole of a large text.
    while on_rank_zero(lambda: next(work, "done") != "done"):
        pass
    _spread(path)
    texts = _map(path)
    for split, text in texts.items():
        if session().rank == 0:
            log.get_logger().info(
                "%s: %s pairs, %s and %s tokens", split, f"{len(text):,}", *(f"{len(s.numbers):,}" for s in (text.source, text.target))
            )
    return Corpus(vocabularies, texts, told["digest"])


def _cache(data: DataConfig) -> Path:
    return Path(data.cache) if data.cache else cache_directory() / "nmt"


def _digest(data: DataConfig, vocabularies: Vocabularies) -> str:
    digest = hashlib.sha256()
    rules = {name: value for name, value in asdict(data).items() if name in ("max_len", "undecodable", "empty", "overlong")}
    digest.update(json.dumps([_FORMAT, rules, vocabularies.digest]).encode())
    for split, names in texts_of(data).items():
        for name in names:
            with locate(name).open("rb") as file:
                digest.update(f"{split} {hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()


def _number_texts(data: DataConfig, vocabularies: Vocabularies, path: Path) -> Iterator[None]:
    """Makes the file at `path` if there is none, a step at a time."""
    if path.is_file():
        return
    tensors: dict[str, Tensor] = {}
    for split, names in texts_of(data).items():
        numbering = _Numbering(data, vocabularies, keep_all=split != "train")
        for pairs in _chunks(read_pairs([locate(name) for name in names], numbering.undecodable)):
            numbering.add(pairs, names)
            yield
        numbering.findings.tell()
        if not numbering.num_pairs:
            raise ConfigError(f"a text must have at least one pair, but none of {' and '.join(names)} is left")
        tensors |= {f"{split}.{name}": tensor for name, tensor in numbering.tensors().items()}
    with suppress(FileExistsError):  # another job has made it meanwhile
        _write(path, tensors)


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        create_file(path, TensorFile(path.name, tensors).chunks())
    except FileExistsError:
        raise
    except OSError as error:
        raise ConfigError(f"numbered texts cannot be kept in {path.parent}: {error}; name another place with data_configs.cache") from error


def _chunks(pairs: Iterator[tuple[str | None, ...]]) -> Iterator[list[tuple[str | None, ...]]]:
    return iter(lambda: list(itertools.islice(pairs, _CHUNK)), [])


class _Numbering:
    """Turns lines into numbers and leaves out what the configuration says."""

    def __init__(self, data: DataConfig, vocabularies: Vocabularies, *, keep_all: bool) -> None:
        self.findings = Findings()
        self.num_pairs = 0
        no_skip = {"skip": "replace"} if keep_all else {}
        checks = {key: LineCheck(key, no_skip.get(policy, policy), self.findings) for key, policy in _policies(data).items()}  # type: ignore[arg-type]
        self.undecodable, self._empty, self._overlong = checks["undecodable"], checks["empty"], checks["overlong"]
        self._vocabularies = (vocabularies.source, vocabularies.target)
        self._max_len = (-1, -1) if keep_all else data.max_len
        self._line = 0
        self._parts: tuple[list[Numbers], list[Numbers]] = ([], [])
        self._lengths: tuple[list[int], list[int]] = ([], [])

    def add(self, pairs: Sequence[tuple[str | None, ...]], names: Sequence[str]) -> None:
        """Numbers the next lines."""
        lines = [[line or "" for line in side] for side in zip(*pairs, strict=True)]
        encoded = [vocabulary.encode_all(side) for vocabulary, side in zip(self._vocabularies, lines, strict=True)]
        kept: tuple[list[int], list[int]] = ([], [])
        for pair, *numbers in zip(pairs, *encoded, strict=True):
            self._line += 1
            if None in pair or not all(self._keeps(side, numbers, f"{names[side]}:{self._line}") for side in (0, 1)):
                continue
            self.num_pairs += 1
            for side in (0, 1):
                kept[side].extend(numbers[side])
                self._lengths[side].append(len(numbers[side]))
        for side in (0, 1):
            self._parts[side].append(np.array(kept[side], dtype=np.int32))

    def _keeps(self, side: int, numbers: list[list[int]], place: str) -> bool:
        """Whether a side of a pair is fit; one that is too long may be cut here."""
        found, most = numbers[side], self._max_len[side]
        if not found:
            return self._empty.met(place, "a sentence must not be empty")
        if most != -1 and len(found) > most:
            fits = self._overlong.met(place, f"a sentence must have at most {most} words or parts, but has {len(found)}")
            numbers[side] = found[:most]
            return fits
        return True

    def tensors(self) -> dict[str, Tensor]:
        """What is kept of the text."""
        found: dict[str, Tensor] = {}
        for side, name in enumerate(("source", "target")):
            found[name] = torch.from_numpy(np.concatenate(self._parts[side]))
            found[f"{name}_ends"] = torch.from_numpy(np.cumsum(self._lengths[side], dtype=np.int64))
        return found


def _policies(data: DataConfig) -> dict[str, str]:
    return {"undecodable": data.undecodable, "empty": data.empty, "overlong": data.overlong}


def _spread(path: Path) -> None:
    """Gives the file to hosts that lack it. Collective."""
    here = session()
    lacking = [rank for rank, has in enumerate(all_gather_object(path.is_file() or here.topology.local_rank != 0)) if not has]
    if not lacking:
        return
    sizes = on_rank_zero(lambda: {"size_bytes": path.stat().st_size})
    content = (
        torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        if here.rank == 0
        else torch.empty(sizes["size_bytes"], dtype=torch.uint8)
    )
    share_tensor(content)
    problem = ""
    if here.rank in lacking:
        problem = _problem_of(lambda: _write_bytes(path, content))
    problems = [f"rank {rank}: {told}" for rank, told in enumerate(all_gather_object(problem)) if told]
    if problems:
        raise ConfigError(f"numbered texts cannot be kept: {'; '.join(problems)}; name another place with data_configs.cache")


def _write_bytes(path: Path, content: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        create_file(path, [content.numpy().data])


def _problem_of(act: Callable[[], None]) -> str:
    try:
        act()
    except OSError as error:
        return str(error)
    return ""


def _map(path: Path) -> dict[str, Text]:
    """The texts on the mapped file, which all ranks of a host share."""
    with safe_open(path, framework="pt", device="cpu") as file:
        arrays: dict[str, Any] = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118 - it is no mapping
    splits = dict.fromkeys(name.partition(".")[0] for name in arrays)
    ordered = [split for split in ("train", "valid", "test") if split in splits]
    return {
        split: Text(*(Side(arrays[f"{split}.{side}"], arrays[f"{split}.{side}_ends"]) for side in ("source", "target")))
        for split in ordered
    }
