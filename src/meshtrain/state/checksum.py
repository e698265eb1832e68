"""CRC-32 of a whole that nobody holds whole: each writer sums its own bytes, and the sums combine into that of the tensor.

CRC-32 is linear over GF(2): a message's checksum is the XOR of what each of its bytes contributes, and a contribution
moves n bytes to the left by a multiplication with x^(8n) modulo the polynomial. So ranks that hold a tensor in pieces,
even interleaved row by row, need to exchange one number a tensor. The result is zlib's (CRC-32/ISO-HDLC), which any tool
can check. The algebra is that of zlib's crc32_combine; a sum here is "raw" (no initial value, no final inversion).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONES = 0xFFFFFFFF
_ONE = 1 << 31  # the polynomial 1: the highest bit is the lowest power


def shift(sum_: int, nbytes: int) -> int:
    """What a contribution becomes when `nbytes` follow."""
    return _multiply(_power(nbytes), sum_)


def finished(contribution: int, nbytes: int) -> int:
    """zlib's checksum of a message of `nbytes`, from the XOR of what all its bytes contribute."""
    return contribution ^ shift(_ONES, nbytes) ^ _ONES


def combined(parts: Iterable[tuple[int, int]]) -> int:
    """zlib's checksum of a message, from (checksum, bytes) of the parts that follow one another in it."""
    total = 0
    for checksum, nbytes in parts:
        total = shift(total, nbytes) ^ checksum
    return total


class Contribution:
    """Gathers what some bytes of one message contribute to its checksum. Feed them in the order of their offsets."""

    def __init__(self) -> None:
        self._sum = 0
        self._end = 0

    def add(self, data: memoryview, offset: int) -> None:
        """Bytes that lie at `offset` of the message."""
        self.add_rows(data, [offset], len(data))

    def add_rows(self, data: memoryview, offsets: Iterable[int], nbytes: int) -> None:
        """Rows of `nbytes` each, which `data` holds one after another, and which lie at these offsets of the message."""
        total, end, position, distance = self._sum, self._end, 0, -1
        table: list[int] = []
        for offset in offsets:
            own = zlib.crc32(data[position : position + nbytes], _ONES) ^ _ONES
            position += nbytes
            gap = offset + nbytes - end
            if gap < 0:  # another block of the message, further to the front
                total ^= shift(own, -gap)
                continue
            if total:
                if gap != distance:
                    distance, table = gap, _table(gap)
                total = (
                    table[total & 255] ^ table[256 + (total >> 8 & 255)] ^ table[512 + (total >> 16 & 255)]
                    ^ table[768 + (total >> 24)]
                )  # fmt: skip
            total ^= own
            end = offset + nbytes
        self._sum, self._end = total, end

    def within(self, nbytes: int) -> int:
        """The contribution to a message of `nbytes`."""
        return shift(self._sum, nbytes - self._end)


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials modulo the CRC's; the lowest bit is the highest power."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & _ONES
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _power(nbytes: int) -> int:
    """x^(8 nbytes)."""
    result, square = _ONE, 1 << 23  # 1, and x^8
    while nbytes:
        if nbytes & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        nbytes >>= 1
    return result


@lru_cache(maxsize=64)
def _table(nbytes: int) -> list[int]:
    """The products of each value of each of the four bytes of a sum with x^(8 nbytes): rows recur at one distance, and
    are many."""
    factor = _power(nbytes)
    bits = [_multiply(factor, 1 << bit) for bit in range(32)]
    table = [0] * 1024
    for byte in range(4):
        for value in range(1, 256):
            low = value & -value
            table[256 * byte + value] = table[256 * byte + value - low] ^ bits[8 * byte + low.bit_length() - 1]
    return table
