"""A shuffle of range(n) that is computed where it is needed, not stored.

A Feistel network over the smallest power of two that holds n; a value that falls outside range(n) is enciphered again until it falls inside
(cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002). Starting, and jumping to any position, cost the same
whatever n is. It is a good shuffle, not a cipher: nobody should hide anything with it.

Many values are enciphered at once inside one long integer, each in a lane of 64 bits: on standard Python alone, an order of magnitude
faster than one by one. The order is part of what a checkpoint means, so it never changes.
"""

import hashlib
import sys
from array import array

from hora.errors import ConfigError

MAX_LENGTH = 2**62
"""Longest range that can be shuffled: each half of a value then fits 31 bits, and a product with it a lane."""

_LANES = 1024  # at once: enough to hide the interpreter's cost, few enough for the first-level cache
_LOW_32 = 0xFFFF_FFFF
_FACTOR_1, _FACTOR_2 = 0x7FEB_352D, 0x846C_A68B  # those of "lowbias32" (C. Wellons, 2018), found by search for little bias


class Permutation:
    """A bijection of range(`length`) onto itself, chosen by `seed` and `epoch`."""

    def __init__(self, length: int, *, seed: int, epoch: int):
        if not 0 <= length <= MAX_LENGTH:
            raise ConfigError(f"the length of a permutation must be from 0 to 2^62, but is {length} instead")
        self.length = length
        bits = max(2, (length - 1).bit_length())
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits
        self._round_keys = [_round_key(length, seed, epoch, number) for number in range(_num_rounds(bits))]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> int:
        """Where `position` goes; constant time and memory."""
        if not 0 <= position < self.length:
            raise IndexError(f"position must be from 0 to {self.length - 1}, but is {position} instead")
        return self._walk(array("Q", [position]))[0]

    def take(self, positions: range) -> list[int]:
        """Where each of `positions` goes, in order; much faster than one by one."""
        found: list[int] = []
        for begin in range(0, len(positions), _LANES):
            found += self._walk(array("Q", positions[begin : begin + _LANES]))
        return found

    def _walk(self, values: "array[int]") -> list[int]:
        found = self._encipher(values).tolist()
        outside = [index for index, value in enumerate(found) if value >= self.length]
        while outside:
            again = self._encipher(array("Q", [found[index] for index in outside]))
            for index, value in zip(outside, again, strict=True):
                found[index] = value
            outside = [index for index in outside if found[index] >= self.length]
        return found

    def _encipher(self, values: "array[int]") -> "array[int]":
        ones = int.from_bytes(array("Q", [1] * len(values)).tobytes(), sys.byteorder)
        low_mask, high_mask, mask_32 = (ones * mask for mask in (2**self._low_bits - 1, 2**self._high_bits - 1, _LOW_32))
        both = int.from_bytes(values.tobytes(), sys.byteorder)
        high, low = both >> self._low_bits & high_mask, both & low_mask
        for number, (key_1, key_2) in enumerate(self._round_keys):
            if number % 2:
                low ^= _mix(high, ones * key_1, ones * key_2, mask_32) & low_mask
            else:
                high ^= _mix(low, ones * key_1, ones * key_2, mask_32) & high_mask
        return array("Q", (high << self._low_bits | low).to_bytes(8 * len(values), sys.byteorder))


def _mix(lanes: int, keys_1: int, keys_2: int, mask_32: int) -> int:
    """Hashes the value of each lane, of at most 32 bits, to 32 bits; the bits above them are not to be used."""
    product = (lanes ^ keys_1) * _FACTOR_1
    product = ((product ^ product >> 32) & mask_32 ^ keys_2) * _FACTOR_2
    return product ^ product >> 32


def _num_rounds(bits: int) -> int:
    # With eight rounds 20,000 shuffles show no bias from 33 elements on; on fewer, each two rounds more halve it.
    return 8 if bits > 8 else 24


def _round_key(length: int, seed: int, epoch: int, number: int) -> tuple[int, int]:
    text = f"{length} {seed} {epoch} {number}".encode()
    digest = hashlib.blake2b(text, digest_size=8, person=b"hora.permutation").digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
