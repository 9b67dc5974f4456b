"""Which gradients travel together: parameters assigned to flat buckets, as pure facts.

Every rank computes the same buckets from the same parameters; the digest of the facts is what ranks compare. Relies on the standard library
alone; the buffers themselves are `sync.gradients`.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

_LEAST_CAP_BYTES, _MOST_CAP_BYTES = 25 * 2**20, 100 * 2**20
_NUM_BUCKETS = 3
_LINE_BYTES = 16


@dataclass(frozen=True)
class ParameterFacts:
    """What all ranks must agree on for one parameter; `kind` is its dtype and device type, as in "torch.float32 cpu"."""

    name: str
    shape: tuple[int, ...]
    kind: str
    item_size_bytes: int
    sparse: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def size_bytes(self) -> int:
        """Size of the dense gradient."""
        return self.numel * self.item_size_bytes


@dataclass(frozen=True)
class BucketFacts:
    """Which bucket it is: of which model, its place, what it holds, and how many bytes travel."""

    model: int
    index: int
    names: tuple[str, ...]
    size_bytes: int


Members = tuple[int, ...]
"""One bucket: indices, in the list of facts, of the parameters whose gradients share a buffer."""


def default_cap_bytes(parameters: Sequence[ParameterFacts]) -> int:
    """How large a bucket is where nobody has said: on GPUs a third of all gradients, within bounds.

    Small sums do not fill the links and take as much of the host's time as large ones; of few sums less is hidden behind backward.
    """
    dense = [facts for facts in parameters if not facts.sparse]
    if not any(facts.kind.endswith(" cuda") for facts in dense):
        return _LEAST_CAP_BYTES
    return min(max(sum(facts.size_bytes for facts in dense) // _NUM_BUCKETS, _LEAST_CAP_BYTES), _MOST_CAP_BYTES)


def assign_buckets(parameters: Sequence[ParameterFacts], cap_bytes: int, first_cap_bytes: int) -> list[Members]:
    """Groups dense parameters into buckets of about `cap_bytes`, the last registered first.

    Backward reaches parameters roughly in the reverse of the order in which they were registered, so buckets fill in their own order. The
    first one is closed at `first_cap_bytes` so that communication begins early (Li et al., PyTorch Distributed, VLDB 2020). A parameter
    larger than the cap has a bucket of its own; a bucket never mixes kinds. In a bucket those of odd sizes come last: the others begin at multiples
    of 16 bytes then, which a GPU reads at a time.
    """
    closed: list[Members] = []
    open_members: dict[str, list[int]] = {}
    open_bytes: dict[str, int] = {}
    for index in reversed(range(len(parameters))):
        facts = parameters[index]
        if facts.sparse:
            continue
        # Others do not wait for a large one, such as an embedding that is tied to the output and complete only at the very end.
        if facts.size_bytes >= cap_bytes and facts.kind in open_members:
            closed.append(tuple(open_members.pop(facts.kind)))
            del open_bytes[facts.kind]
        members = open_members.setdefault(facts.kind, [])
        members.append(index)
        open_bytes[facts.kind] = open_bytes.get(facts.kind, 0) + facts.size_bytes
        if open_bytes[facts.kind] >= (cap_bytes if closed else min(first_cap_bytes, cap_bytes)):
            closed.append(tuple(members))
            del open_members[facts.kind], open_bytes[facts.kind]
    buckets = [*closed, *map(tuple, open_members.values())]
    return [tuple(sorted(members, key=lambda member: parameters[member].size_bytes % _LINE_BYTES != 0)) for members in buckets]


def order_in_parts(parameters: Sequence[ParameterFacts], buckets: Sequence[Members], part_bytes: int) -> list[int]:
    """In which order buckets leave where gradients come in parts, all of one part at once, as of a compiled model.

    Parts have `part_bytes` of gradients or a little more, the last registered first. Of buckets that come together the largest leaves first: its
    update is made while others travel, and little is left to be updated behind the last.
    """
    part_of: dict[int, int] = {}
    part = filled_bytes = 0
    for index in reversed(range(len(parameters))):
        if not parameters[index].sparse:
            part_of[index] = part
            filled_bytes += parameters[index].size_bytes
            if filled_bytes >= part_bytes:
                part, filled_bytes = part + 1, 0

    def place(number: int) -> tuple[int, int]:
        members = buckets[number]
        return max(part_of[member] for member in members), -sum(parameters[member].size_bytes for member in members)

    return sorted(range(len(buckets)), key=place)


def digest(parameters: Sequence[ParameterFacts], buckets: Sequence[Members]) -> str:
    """SHA-256 (hex) of everything that decides what the ranks send each other."""
    text = json.dumps([[asdict(facts) for facts in parameters], list(buckets)])
    return hashlib.sha256(text.encode()).hexdigest()
