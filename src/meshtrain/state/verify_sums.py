"""Files held against the checksums of a manifest, in bounded memory. Needs no torch."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from meshtrain.errors import Damaged
from meshtrain.state.header import open_regular
from meshtrain.state.manifest import MANIFEST, FileSums
from meshtrain.state.names import OTHER

BUFFER_BYTES = 4 * 2**20


def check_file(folder: Path, name: str, sums: FileSums) -> None:
    """Raise Damaged unless a file has its size, and its header, or without one its whole content, is what was written."""
    path = folder / name
    if not os.path.lexists(path):
        raise Damaged(f"{path}: is missing, though {MANIFEST} lists it; {OTHER}")
    with open_regular(path) as (descriptor, size):
        if size != sums.bytes:
            raise Damaged(f"{path}: has {size} bytes where {sums.bytes} were written; {OTHER}")
        end, expected, what = size, sums.crc32, "its content"
        if sums.header is not None:
            end, expected, what = int.from_bytes(os.pread(descriptor, 8, 0), "little") + 8, sums.header, "its header"
        if end > size:
            raise Damaged(f"{path}: its header is damaged (it claims {end} bytes of {size}); {OTHER}")
        found = sum_of(descriptor, end)
    if found != expected:
        raise Damaged(f"{path}: {what} sums to {found:08x} where {expected:08x} was written: damaged since; {OTHER}")


def sum_of(descriptor: int, end: int) -> int:
    """The checksum of the first `end` bytes of an open file, or of all where it has fewer."""
    buffer, total, position = memoryview(bytearray(min(BUFFER_BYTES, max(end, 1)))), 0, 0
    while position < end and (count := os.preadv(descriptor, [buffer[: end - position]], position)):
        total, position = zlib.crc32(buffer[:count], total), position + count
    return total


def wrong_sum(found: int, expected: int | None) -> str:
    """What is to be said of a tensor whose bytes are not those that were written."""
    if expected is None:
        return f"{MANIFEST} does not list it, so it was put there since; {OTHER}"
    return f"sums to {found:08x} where {expected:08x} was written: damaged since; {OTHER}"
