"""Checksums of parts make zlib's checksum of the whole, however the parts are cut and whoever holds them."""

from __future__ import annotations

import zlib
from itertools import pairwise
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtrain.state.checksum import Contribution, combined, finished, shift
from meshtrain.state.sums import Sums
from meshtrain.state.team import Team


def raw(data: bytes) -> int:
    """A checksum that begins with nothing and is not inverted at the end."""
    return crc32(data, 0xFFFFFFFF) ^ 0xFFFFFFFF


FILE = Path("a.safetensors")


def cuts(total: int, count: int) -> st.SearchStrategy[list[int]]:
    """Sorted positions that cut `total` bytes into at most `count` parts, some of them empty."""
    return st.lists(st.integers(0, total), max_size=count - 1).map(lambda at: [0, *sorted(at), total])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_parts_in_a_row_combine(data: st.DataObject) -> None:
    message = data.draw(st.binary(max_size=300))
    at = data.draw(cuts(len(message), 6))
    parts = [message[a:b] for a, b in pairwise(at)]
    assert combined((crc32(part), len(part)) for part in parts) == zlib.crc32(message)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_parts_of_several_holders_in_any_order_make_the_whole(data: st.DataObject) -> None:
    """Each holder feeds its own parts; the XOR of what they contribute is the sum of the whole."""
    message = data.draw(st.binary(max_size=300))
    at = data.draw(cuts(len(message), 8))
    parts = data.draw(st.permutations(list(pairwise(at))))
    holders = [Contribution() for _ in range(3)]
    for number, (begin, end) in enumerate(parts):
        holders[number % 3].add(memoryview(message)[begin:end], begin)
    total = 0
    for holder in holders:
        total ^= holder.within(len(message))
    assert finished(total, len(message)) == zlib.crc32(message)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.binary(min_size=729, max_size=729))
def test_rows_of_a_matrix_cut_along_its_columns(rows: int, left: int, right: int, source: bytes) -> None:
    width = left + right
    message = source[: rows * width]
    total = 0
    for begin, end in ((0, left), (left, width)):
        packed = b"".join(message[row * width + begin : row * width + end] for row in range(rows))
        holder = Contribution()
        holder.add_rows(memoryview(packed), [row * width + begin for row in range(rows)], end - begin)
        total ^= holder.within(len(message))
    assert finished(total, len(message)) == zlib.crc32(message)


def test_many_rows_and_rows_at_changing_distances() -> None:
    message = bytes(range(256)) * 64
    holder = Contribution()
    offsets = [(n * n) % 13 + 16 * n for n in range(1000)]
    for offset in offsets:
        holder.add(memoryview(message)[offset : offset + 3], offset)
    rest, begin = Contribution(), 0
    for offset in offsets:
        rest.add(memoryview(message)[begin:offset], begin)
        begin = offset + 3
    rest.add(memoryview(message)[begin:], begin)
    whole = holder.within(len(message)) ^ rest.within(len(message))
    assert finished(whole, len(message)) == zlib.crc32(message)


def test_beyond_four_gigabytes() -> None:
    """A shift by n bytes is n shifts by one: checked by halving, as no such message is made."""
    value, far = raw(b"some bytes"), 5 * 2**32 + 3
    assert shift(shift(value, far), far) == shift(value, 2 * far)
    assert shift(value, 0) == value
    assert shift(value, 3) == raw(b"some bytes" + bytes(3))


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_shows(bit: int) -> None:
    message = bytearray(b"the quick brown fox jumps over the lazy dog")
    for position in range(len(message)):
        message[position] ^= 1 << bit
        half = len(message) // 2
        parts = [bytes(message[:half]), bytes(message[half:])]
        assert combined((crc32(p), len(p)) for p in parts) != zlib.crc32(b"the quick brown fox jumps over the lazy dog")
        message[position] ^= 1 << bit


def test_tensors_of_one_file_are_kept_apart_and_empty_ones_begin_where_the_next_does() -> None:
    """An empty tensor has the same first byte as the tensor after it."""
    sums = Sums()
    sums.of(FILE, 100)  # the empty one: nothing is added
    sums.of(FILE, 100).add(memoryview(b"abcd"), 0)
    sums.of(FILE, 104).add(memoryview(b"ef"), 0)
    places = [(FILE, 100, 0), (FILE, 100, 4), (FILE, 104, 2), (FILE, 106, 0), (Path("other"), 100, 0)]
    assert sums.combined(places, Team()) == [zlib.crc32(part) for part in (b"", b"abcd", b"ef", b"", b"")]


def test_what_nobody_wrote_counts_as_nothing() -> None:
    """A tensor that no rank fed has not the sum of any content, so it shows as damaged rather than as right."""
    (found,) = Sums().combined([(FILE, 8, 4)], Team())
    assert found == zlib.crc32(bytes(4))
