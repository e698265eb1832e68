"""The order of samples: a keyed permutation of 0..n-1 that is computed one index at a time.

It is not a sampler and holds no state: sample k of a run is a pure function of (k, n, seed), so a run can be
resumed, or cut over other ranks, at any sample. Nothing of size n is ever made, so a corpus of billions of
sequences costs the same as a small one.

The permutation is a Feistel network over a rectangle of a x b >= n cells, whose half-blocks are added modulo
a and b in turn, with "cycle walking" for the few cells beyond n (Black and Rogaway, "Ciphers with Arbitrary
Finite Domains", CT-RSA 2002). It shuffles; it is not meant to keep secrets."""

import hashlib
from functools import lru_cache
from math import isqrt

_ROUNDS = 8
_MASK = (1 << 64) - 1


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.sha512(f"meshtrain sample order {seed} {epoch}".encode()).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS))


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): every input bit reaches every output
    bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def permuted_index(index: int, size: int, seed: int, epoch: int) -> int:
    """The element at place `index` of the permutation of 0..size-1 that belongs to (seed, epoch).

    A bijection of 0..size-1 for fixed (size, seed, epoch). Constant memory, a few microseconds.
    Raises ValueError unless 0 <= index < size.
    """
    if not 0 <= index < size:
        raise ValueError(f"index {index} is outside of the permutation's range 0..{size - 1}")
    rows = isqrt(size - 1) + 1
    columns = -(-size // rows)
    keys = _round_keys(seed, epoch)
    cell = index
    while True:
        row, column = divmod(cell, columns)
        for i in range(0, _ROUNDS, 2):
            row = (row + _mix((column + keys[i]) & _MASK)) % rows
            column = (column + _mix((row + keys[i + 1]) & _MASK)) % columns
        cell = row * columns + column
        if cell < size:
            return cell


def sequence_of_sample(sample: int, size: int, seed: int) -> int:
    """The sequence (0..size-1) that is sample number `sample` of a run: each epoch of `size` samples is a
    permutation of its own, so no sequence comes twice within an epoch."""
    epoch, index = divmod(sample, size)
    return permuted_index(index, size, seed, epoch)
