"""Seeds of random numbers, as a pure function of what they are for.

`derive_key` makes a key of a purpose, `seed_at` the seed at a position of it: two different (purpose, position) never share a stream, and
neighbouring positions have seeds that look nothing alike. No state is kept, so a run that is resumed finds the same seeds.
"""

import hashlib

_LOW_64 = 0xFFFF_FFFF_FFFF_FFFF


def derive_key(purpose: str, *numbers: int) -> int:
    """A 64-bit key for `purpose` and numbers such as (seed, epoch)."""
    text = " ".join([purpose, *map(str, numbers)]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"hora.seeds").digest(), "little")


def seed_at(key: int, position: int) -> int:
    """The 64-bit seed at `position` (SplitMix64: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014)."""
    mixed = (key + (position + 1) * 0x9E37_79B9_7F4A_7C15) & _LOW_64
    mixed = (mixed ^ mixed >> 30) * 0xBF58_476D_1CE4_E5B9 & _LOW_64
    mixed = (mixed ^ mixed >> 27) * 0x94D0_49BB_1331_11EB & _LOW_64
    return mixed ^ mixed >> 31
